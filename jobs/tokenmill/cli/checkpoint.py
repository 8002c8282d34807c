"""`tokenmill checkpoint`: what a run has saved, whether it is whole, and how to put it in order."""

import json as jsonlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import Command

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at a run's checkpoints, check them, put them in order.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkpoints = Annotated[Path, typer.Argument(metavar="PATH", help="A run's directory of checkpoints.")]


def _check(path: Path) -> None:
    from tokenmill.errors import RequestError

    if not os.path.isdir(path):  # noqa: PTH112 - which raises nothing, however long the path
        raise RequestError(f"{path} is no directory")


@checkpoint.command("list", cls=Command)
def list_(path: Checkpoints, json: o.Json = False) -> None:
    """List the checkpoints, oldest first: iteration, size, age, whether they are whole; * marks the tracker's."""
    from tokenmill.flow.progress import duration, size
    from tokenmill.training.checkpoints.repair import TRACKER, ForeignTracker, TornTracker, scan, tracked
    from tokenmill.training.checkpoints.torch_dist import RELEASE

    _check(path)
    named, torn = None, None
    try:
        named = tracked(path)
    except ForeignTracker:
        raise
    except TornTracker as problem:
        torn = str(problem)
    found = scan(path)
    if json:
        facts = {
            "event": "checkpoints",
            "path": str(path),
            "tracker": named,
            "tracker_problem": torn,
            "checkpoints": [
                {
                    "iteration": one.iteration,
                    "name": one.path.name,
                    "complete": one.complete,
                    "problems": one.problems,
                    "bytes": one.bytes,
                    "mtime": one.mtime,
                    "tracked": one.path.name == named,
                }
                for one in found
            ],
        }
        sys.stdout.write(jsonlib.dumps(facts) + "\n")
        return
    for one in found:
        mark = "*" if one.path.name == named else " "
        number = RELEASE if one.path.name == RELEASE else str(one.iteration)
        age = duration(max(0.0, time.time() - one.mtime)) if one.mtime else ""
        sys.stdout.write(f"{mark} {number:>9}  {size(one.bytes):>9}  {age:>11}  {one.state}\n")
    if torn:
        sys.stdout.write(f"{torn}\n")
    elif named is None:
        sys.stdout.write(f"there is no {path / TRACKER}\n")
    elif named not in [one.path.name for one in found]:
        sys.stdout.write(f"{path / TRACKER} names {named}, which is not there\n")


@checkpoint.command(cls=Command)
def verify(
    path: Checkpoints,
    quick: Annotated[bool, typer.Option("--quick", help="Structure and sizes only; compare no hashes.")] = False,
    json: o.Json = False,
) -> None:
    """Check the checkpoint that a run would resume from, with the hashes that --verify-integrity left; 2 if damaged."""
    from tokenmill.errors import InputError
    from tokenmill.training.checkpoints.repair import TRACKER, look

    _check(path)
    found = look(path, full=not quick)
    if found is None:
        raise InputError(f"there is no {path / TRACKER}: no save was finished there, or it is another run's directory")
    if json:
        facts = {
            "event": "verify",
            "quick": quick,
            "iteration": found.iteration,
            "checkpoint": str(found.path),
            "problems": found.problems,
        }
        sys.stdout.write(jsonlib.dumps(facts) + "\n")
    else:
        for problem in found.problems:
            sys.stdout.write(f"wrong: {problem}\n")
    if found.problems:
        raise InputError(
            f"{found.path} is not whole: {found.state}; see what else there is: tokenmill checkpoint list {path}"
        )
    if not json:
        hashed = (found.path / "integrity.json").exists() and not quick
        sys.stdout.write(f"{found.path} is whole{', and its hashes are right' if hashed else ''}\n")


@checkpoint.command(cls=Command)
def repair(
    path: Checkpoints,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    start_over: Annotated[
        bool,
        typer.Option("--start-over", help="Where no checkpoint is whole, move all aside: the next run begins anew."),
    ] = False,
    json: o.Json = False,
) -> None:
    """Do what a run does before it starts: tracker to a whole checkpoint, newer directories aside.

    No run may be using the directory.
    """
    from tokenmill.flow.progress import Reporter
    from tokenmill.training.checkpoints.repair import prepare

    _check(path)
    start = prepare(path, dry_run=dry_run, start_over=start_over, say=Reporter(json_lines=json).say)
    if json:
        facts = {
            "event": "repair",
            "dry_run": dry_run,
            "iteration": start.iteration,
            "checkpoint": start.name,
            "done": start.done,
        }
        sys.stdout.write(jsonlib.dumps(facts) + "\n")
        return
    for sentence in start.done:
        sys.stdout.write(f"{'would be done: ' if dry_run else ''}{sentence}\n")
    where = f"resumes from {path / start.name}" if start.name else "begins from nothing"
    sys.stdout.write(f"{'nothing was changed; ' if dry_run else ''}a run {where}\n")
