"""Megatron-LM's checkpoints, read without torch: are they complete, which data they were trained on, their repair.

Modules, in the order of their imports:

    metadata    the tensors of a torch_dist checkpoint and the bytes that they need: its .metadata
    torch_file  whether a file that torch.save wrote is complete
    torch_dist  one checkpoint: is it complete, its size, its age
    identity    the data that a run's checkpoints were trained on, recorded next to them
    repair      which checkpoint an attempt resumes from, which are moved aside, which are deleted
"""
