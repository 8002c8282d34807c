"""Run megatron-core for Python 3.12 on Python 3.11: its sources need typing.override, a decorator without effect.

Python imports this module at its start from PYTHONPATH, in the ranks and in the processes that they spawn.
"""

import typing

if not hasattr(typing, "override"):
    typing.override = lambda function: function
