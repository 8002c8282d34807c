"""Megatron-LM's checkpoints, read without torch: whole or torn, what they were trained on, and their repair.

Modules, those that read others below them:

    metadata    which bytes of which file a torch_dist checkpoint needs: its .metadata, read without unpickling
    torch_file  whether a file that torch.save wrote is whole
    torch_dist  one checkpoint: is it whole, how large is it, how old
    identity    what a run's checkpoints were trained on, kept beside them
    repair      which checkpoint a start resumes from, which are set aside, which deleted
"""
