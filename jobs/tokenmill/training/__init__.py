"""From a finished dataset to a Megatron-LM run that starts right, survives and says when it has not finished."""

MOST = 1 << 40
"""No count is greater: what is, is a slip, and might not fit a float."""
