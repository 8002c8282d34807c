"""The test Hub: a small HTTP server with the Hugging Face Hub's protocol, and with faults on demand.

The tests and the end-to-end run on a cluster download from the test Hub, through huggingface_hub and `tokenmill
download`. `repository` contains the served data, `protocol` builds the responses, `faults` decides which
requests fail, and `server` owns the two ports. `python -m support.hub DIR`, run in tests/, serves a directory.
Imports are relative, because the pod of the end-to-end run mounts only these files. The modules import nothing but
the standard library and `tokenmill.errors`.
"""

from .faults import Fault, FaultPlan
from .protocol import Request
from .server import Hub

__all__ = ["Fault", "FaultPlan", "Hub", "Request"]
