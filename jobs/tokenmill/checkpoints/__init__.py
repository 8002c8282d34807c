"""Megatron-LM's checkpoints, read and written without torch: complete or not, their repair, conversion of models.

Modules, in the order of their imports:

    metadata      the tensors of a torch_dist checkpoint and the bytes that they need: its .metadata
    torch_file    whether a file that torch.save wrote is complete
    torch_dist    one checkpoint: is it complete, its size, its age
    model_record  the model and the tokenizer of a run, recorded next to its checkpoints
    repair        which checkpoint an attempt resumes from, which are moved aside, which are deleted
    families      what differs between the models that can be converted, a module for each model type
    convert       from and to Hugging Face's format
"""
