"""Megatron-LM's checkpoints, read without torch: whole or torn, what they were trained on, and their repair."""
