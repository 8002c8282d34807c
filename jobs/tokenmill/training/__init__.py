"""From a finished dataset to a Megatron-LM run that starts right, survives and says when it has not finished."""

MOST = 1 << 40
"""No count is greater: what is, is a slip, and might not fit a float."""

ITERATIONS = 1000
"""Iterations of a run whose settings name none."""
SEQUENCES_A_GPU = 16
"""Sequences of a global batch for each GPU, where neither the settings nor the model's recipe give the batch."""
