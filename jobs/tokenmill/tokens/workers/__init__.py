"""Encoder processes: started, fed with text through shared memory, replaced when they crash or hang."""
