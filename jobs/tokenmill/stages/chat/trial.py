"""Try a chat template with probes and the first rows in a subprocess, whose time and memory are limited.

`try_template` starts `python -m tokenmill.stages.chat.trial`. The program reads a pickled Trial from standard input and
writes a TrialResult as JSON, because the command does not unpickle what a process that ran a template writes.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmill.core.machine import ignore_stop_signals
from tokenmill.errors import RequestError, TransientError
from tokenmill.stages.chat.encode import Rendering
from tokenmill.stages.chat.gate import Row, RowCutter, Tokenizer, resolve_rendering
from tokenmill.stages.chat.limits import enforce_limits, explain_signal
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.rows import BadRow
from tokenmill.tokenize.gate import child_environment, describe_exit, killed_message, was_killed

TIMEOUT_SECONDS = 600.0
"""Time of a trial; with usual templates, it takes less than a second."""

MAX_TEXT_CHARACTERS = 1_000_000
"""Characters of the texts that a trial returns."""


class Trial(NamedTuple):
    """A template to try: the options that name it, the tokenizer, and the first rows of the input."""

    options: ChatOptions
    tokenizer: Tokenizer
    rows: Sequence[Row]


class TrialResult(NamedTuple):
    """The resolved template, and the first texts that the encoder gets; or the reason why it cannot be used."""

    rendering: Rendering | None = None
    texts: list[str] = []  # noqa: RUF012 - a field of a NamedTuple
    error: str = ""


def try_template(options: ChatOptions, tokenizer: Tokenizer, rows: Sequence[Row]) -> tuple[Rendering, list[str]]:
    """Return the template of a plan as `gate.resolve_rendering` does, and the first texts of the rows.

    Raises:
        RequestError: there is no template, or it cannot be used for the rows.
        TransientError: another process killed the subprocess.
    """
    from tokenmill.core.typed_json import convert_json

    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "tokenmill.stages.chat.trial"],
            input=pickle.dumps(Trial(options, tokenizer, rows)),
            capture_output=True,
            env=child_environment(),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TransientError(
            f"the trial of the chat template did not end within {TIMEOUT_SECONDS:g} s; free CPUs of this machine, and "
            "run the same command again"
        ) from error
    output = child.stderr.decode(errors="replace")
    description = describe_exit(child.returncode, output)
    if was_killed(child.returncode, output):
        raise TransientError(killed_message("that tries the chat template", description))
    if child.returncode < 0:
        name = "the chat template of the tokenizer" if options.chat_template == "tokenizer" else options.chat_template
        raise explain_signal(name, -child.returncode)
    if child.returncode:
        raise TransientError(f"the trial of the chat template {description}; run the same command again")
    result = convert_json(json.loads(child.stdout), TrialResult)
    if result.rendering is None:
        raise RequestError(result.error)
    return result.rendering, result.texts


def _cut_first_rows(rendering: Rendering, trial: Trial) -> Iterator[str]:
    """Yield the first texts of the rows that are not bad."""
    cutter, characters = RowCutter(trial.options.encoding(rendering)), 0
    for row in trial.rows:
        try:
            texts = cutter.chunk_texts(row.value, columnar=row.columnar)
        except BadRow:
            continue
        yield from texts
        characters += sum(map(len, texts))
        if characters > MAX_TEXT_CHARACTERS:
            return


def main() -> None:
    """Try the template of standard input."""
    from msgspec import to_builtins

    ignore_stop_signals()
    enforce_limits()
    trial: Trial = pickle.load(sys.stdin.buffer)  # noqa: S301 - the parent wrote it
    try:
        rendering = resolve_rendering(*trial)
        result = TrialResult(rendering, list(_cut_first_rows(rendering, trial)))
    except RequestError as error:
        result = TrialResult(error=str(error))
    sys.stdout.write(json.dumps(to_builtins(result)))


if __name__ == "__main__":
    main()
