"""One start of a run: rendezvous, lease, the trainer supervised, and the end judged."""
