"""The memory equation for checks of the layouts of `tokenmill fit`."""

from tokenmill.fit.layout import Layout
from tokenmill.fit.memory import activation_bytes, weight_optimizer_bytes


def total_bytes(layout: Layout) -> float:
    """Return the bytes that the fullest GPU needs, without a reserve."""
    return weight_optimizer_bytes(layout) + activation_bytes(layout)
