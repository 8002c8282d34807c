"""Several stages as one command, and the corpus of `tokenmill sample`."""
