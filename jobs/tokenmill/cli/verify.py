"""`tokenmill verify`: is what lies there what was made?"""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.errors import InputError


def verify(
    path: Annotated[Path, typer.Argument(help="A dataset's directory, a stage's output, or a pair's path.")],
    quick: Annotated[bool, typer.Option("--quick", help="Structure and sizes only; read no file whole.")] = False,
    stage: o.Only = None,
    json: o.Json = False,
) -> None:
    """Check outputs as Megatron-LM will read them, and against the hashes recorded when they were made."""
    from tokenmill.stages.registry import KINDS
    from tokenmill.tokens.dataset import check

    checked, wrong = check(path, KINDS, full=not quick, stage=stage)
    if json:
        facts = {"event": "verify", "quick": quick, "checked": checked, "problems": wrong}
        sys.stdout.write(jsonlib.dumps(facts) + "\n")
    else:
        for line in checked:
            sys.stdout.write(f"checked {line}\n")
        for problem in wrong:
            sys.stdout.write(f"wrong: {problem}\n")
    if wrong:
        raise InputError(f"{len(wrong)} problem{'s' * (len(wrong) > 1)} in {path}")
    if not json:
        sys.stdout.write("all right\n")
