"""One start of a run: rendezvous, lease, the trainer supervised, and the end judged.

Modules, those that read others below them:

    node        which of a run's nodes this is, and the launcher's words
    watch       what Megatron-LM's output says: progress, and why it ended
    output      the log: the launcher's lines, and tokenmill's own between them
    processes   the launcher's processes: found, signalled, killed
    supervise   runs the launcher, ends what hangs
    attempts    what starts leave beside the checkpoints: attempts, verdict, progress, arrivals, failures
    others      what the nodes tell each other of their progress
    rendezvous  which nodes have come, and which have come again
    lease       one run at a time writes to the checkpoints
    prepare     the run, checked and composed from its settings file
    judge       how an attempt ended: exit code and reason
    run         `tokenmill train`: all of it in order
"""
