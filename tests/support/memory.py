"""The equation that the layouts of `tokenmill fit` are checked against."""

from tokenmill.training.planner.layout import Layout
from tokenmill.training.planner.memory import activation_bytes, weight_optimizer_bytes


def total_bytes(layout: Layout) -> float:
    """Return what the fullest GPU needs, without a reserve."""
    return weight_optimizer_bytes(layout) + activation_bytes(layout)
