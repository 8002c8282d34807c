"""The process of a rank of another framework: `torchrun framework_child.py DIRECTORY:DIRECTORY PROGRAM ARGUMENTS`.

The interpreter that has torch may not have tokenmill, as in the training image. The directories have tokenmill with its
dependencies, and Megatron-LM; they are searched last, so that no package of the interpreter is replaced.
"""

import os
import runpy
import sys


def main() -> None:
    """Run the program as its own process would."""
    paths, program = sys.argv[1:3]
    del sys.argv[:2]
    sys.path[0] = os.path.dirname(program)  # noqa: PTH120 - no further import before the program's
    sys.path += paths.split(os.pathsep)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
