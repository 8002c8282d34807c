"""The test Hub: a small HTTP server that speaks the Hugging Face Hub's protocol, with faults on demand.

The tests and the end-to-end run on a cluster download from it, through huggingface_hub and `tokenmill
download`, as they would from the Hub. `repository` holds what is served,
`protocol` answers requests, `faults` says what goes wrong, `server` owns the two ports; `python -m
support.hub DIR`, from tests/, serves a directory. Imports are relative: the pod of the end-to-end run mounts
these files alone. Standard library and `tokenmill.errors` only.
"""

from .faults import Fault, FaultPlan
from .protocol import Request
from .server import Hub

__all__ = ["Fault", "FaultPlan", "Hub", "Request"]
