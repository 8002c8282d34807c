"""Entry point of the installed command `tokenmill` and of `python -m tokenmill`."""

import faulthandler
import gc
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit."""
    faulthandler.enable()  # a fault in native code writes the stacks of the threads to standard error
    # With the default threshold, garbage collection takes 10 % of a start and a third of planning 59,166 units.
    gc.set_threshold(100_000)
    from tokenmill.cli import console

    console()


if __name__ == "__main__":
    main()
