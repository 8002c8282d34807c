"""What families share.

module          responsibility
config_reader   values of a config.json, with errors that name the key
tensors         pieces of Megatron-LM's tensors, and its names of tensors
base            the interface of families
rotary          the decoder of Llama, which most families vary
"""
