"""What a run reads: datasets blended, cut into splits, and the sample index that Megatron-LM reads."""
