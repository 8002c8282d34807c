"""The program: `tokenmill` where it is installed, `python -m tokenmill` everywhere."""

import gc
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and end the process."""
    # Else a tenth of a start, and a third of planning 59,166 units, would be looking whether they are garbage.
    gc.set_threshold(100_000)
    from tokenmill.cli import console

    console()


if __name__ == "__main__":
    main()
