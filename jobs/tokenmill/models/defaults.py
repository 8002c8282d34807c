"""Numbers of a run that its settings and its model's recipe do not contain, and the limit of both."""

MAX_COUNT = 1 << 40
"""Upper limit of every count: a greater number is a typing error, and a float might not hold it."""

DEFAULT_ITERATIONS = 1000
"""Iterations of a run whose settings do not specify the number."""
SEQUENCES_PER_GPU = 16
"""Sequences per GPU in a global batch, when neither the settings nor the model's recipe specifies the batch."""
