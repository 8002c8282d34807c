"""Training samples from pairs and packed rows: Megatron-LM's samples in Megatron-LM's order, with numpy alone.

    samples = tokenmill.data.open("corpus/tokenized", seq_length=4096, samples=1_000_000)
    batch = samples.batch([0, 1, 2, 3])

This is the public interface of `tokenmill.samples`.
"""

from tokenmill.samples.batch import IGNORED, Batch
from tokenmill.samples.identity import DataIdentity, list_differences
from tokenmill.samples.opening import open
from tokenmill.samples.order import Order
from tokenmill.samples.samples import SampleDigest, SampleOrigin, Samples

__all__ = [
    "IGNORED",
    "Batch",
    "DataIdentity",
    "Order",
    "SampleDigest",
    "SampleOrigin",
    "Samples",
    "list_differences",
    "open",
]
