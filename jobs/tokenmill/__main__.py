"""Entry point of the installed command `tokenmill` and of `python -m tokenmill`."""

import faulthandler
import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit."""
    _open_closed_streams()
    faulthandler.enable()  # a fault in native code writes the stacks of the threads to standard error
    # With the default threshold, garbage collection takes 10 % of a start and a third of planning 59,166 units.
    gc.set_threshold(100_000)
    from tokenmill.engine.signals import end_on_signals

    end_on_signals()
    from tokenmill.cli import console

    console()


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed: another file would get its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


if __name__ == "__main__":
    main()
