"""The test Hub: a small HTTP server that speaks the Hugging Face Hub's protocol, with faults on demand.

The sample of the quick start, the tests and the end-to-end run on a cluster download from it, through
huggingface_hub and `tokenmill download`, as they would from the Hub. `repository` holds what is served,
`protocol` answers requests, `faults` says what goes wrong, `server` owns the two ports; `python -m
tokenmill.testhub DIR` serves a directory. Standard library only.
"""

from tokenmill.testhub.faults import Fault, FaultPlan
from tokenmill.testhub.protocol import Request
from tokenmill.testhub.server import Hub

__all__ = ["Fault", "FaultPlan", "Hub", "Request"]
