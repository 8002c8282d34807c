"""A document as its reader uses it: its fenced commands, one by one, and the output that the document specifies."""

import os
import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import ROOT, Account, Namespace
from support.commandline import CommandResult

AS_USER = re.compile(r"charts/dataset-|\blook\b|\bjob[ /]|\bhelm test\b")
"""Commands that the role edit permits; volumes, nodes and PyTorchJobs need an administrator here."""
TOO_EARLY = ("is waiting to start", "not found", "timed out waiting for the condition")
"""Errors of `kubectl logs` before there are any logs."""


@dataclass(frozen=True)
class Command:
    """A command with its lines joined, and its source `FILE:LINE`."""

    text: str
    source: str


@dataclass(frozen=True)
class Block:
    """A block of commands below a heading, and the lines of output that the document specifies."""

    heading: str
    commands: tuple[Command, ...]
    output: tuple[str, ...]


@dataclass(frozen=True)
class Instead:
    """A replacement for a text of the document in this cluster, with its reason."""

    original: str
    replacement: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """A command that is not run here, with its reason; the objects of a `helm install` are still validated."""

    original: str
    reason: str


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document: `sh` contains commands, `text` the output of the block before it.

    Other blocks are errors.
    """
    parsed: list[Block] = []
    heading, fence, first_line, lines = "", "", 0, [""]
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if fence:
                lines.append(line)
            elif line.startswith("#"):
                heading = line.lstrip("# ")
        elif not fence:
            fence, first_line, lines = line.removeprefix("```"), number, []
        else:
            if fence == "sh":
                parsed.append(Block(heading, tuple(commands(lines, document, first_line + 1)), ()))
            else:
                assert fence == "text", (
                    f"{document.name}:{first_line}: a block of {fence!r} is neither run nor compared"
                )
                parsed[-1] = Block(parsed[-1].heading, parsed[-1].commands, tuple(lines))
            fence = ""
    return parsed


def commands(lines: Sequence[str], document: Path, number: int) -> list[Command]:
    """Return the commands of a block: one per line, with the lines that a backslash or <<'END' continues."""
    parsed: list[Command] = []
    rest = list(lines)
    while rest:
        command_line = number + len(lines) - len(rest)
        text = rest.pop(0)
        while text.endswith("\\"):
            text = text.removesuffix("\\").rstrip() + " " + rest.pop(0).lstrip()
        if text.endswith("<<'END'"):
            while not text.endswith("\nEND"):
                text += "\n" + rest.pop(0)
        parsed.append(Command(text, f"{document.name}:{command_line}"))
    return parsed


def is_printed(expected: str, output: str) -> bool:
    """Return whether an output has the expected line; `...` matches any text, and blanks match blanks."""
    pattern = ".*".join(re.escape(part) for part in " ".join(expected.split()).split("..."))
    return any(re.fullmatch(pattern, " ".join(line.split())) for line in output.splitlines())


class Reader:
    """Runs the commands of a document from its first line to its last."""

    def __init__(
        self,
        document: Path,
        namespace: Namespace,
        directory: Path,
        table: Sequence[Instead | LeftOut],
        environment: Mapping[str, str],
        after: Mapping[str, Callable[[], None]],
    ) -> None:
        """Open the document in a clone; `after` maps headings to functions that run after the blocks of the heading."""
        self.blocks = blocks(document)
        self.namespace, self.directory, self.table, self.after = namespace, directory, table, after
        self.environment, self.exports = environment, list[str]()
        self.position, self.stopped = 0, ""

    def read_to(self, heading: str) -> None:
        """Run the remaining commands to the end of a heading's blocks."""
        end = 1 + max(number for number, block in enumerate(self.blocks) if block.heading == heading)
        while self.position < end:
            assert not self.stopped, f"the reader stopped at {self.stopped}"
            block = self.blocks[self.position]
            self.stopped = block.commands[0].source
            self.read(block)
            self.stopped = ""
            self.position += 1
            if block.heading in self.after and block.heading not in [b.heading for b in self.blocks[self.position :]]:
                self.after[block.heading]()

    def read(self, block: Block) -> None:
        """Run a block, and compare its output."""
        output = ""
        for command in block.commands:
            if command.text.startswith("helm install"):
                self.validate(command)
            if not any(isinstance(change, LeftOut) and change.original in command.text for change in self.table):
                output += self.type(command)
        missing = [line for line in block.output if not is_printed(line, output)]
        assert not missing, f"{block.commands[0].source}: not printed: {missing}\n{output}"

    def type(self, command: Command) -> str:
        """Run a command, which must succeed, and return its standard output."""
        text = command.text
        for change in self.table:
            if isinstance(change, Instead):
                text = text.replace(change.original, change.replacement)
        account = self.namespace.user if AS_USER.search(text) else self.namespace.admin
        if text.startswith("export "):
            self.exports.append(text)
            return ""
        if text.startswith("kubectl port-forward"):
            return self.check_port_forward(account, text)
        deadline = time.monotonic() + 90
        while (ended := self.shell(account, text)).code and text.startswith("kubectl logs"):
            if time.monotonic() > deadline or not any(message in ended.err for message in TOO_EARLY):
                break
            time.sleep(0.5)  # the pod has not started yet
        assert ended.code == 0, f"{command.source}: {text}\nexit code {ended.code}\n{ended.out}{ended.err}"
        return ended.out

    def shell(self, account: Account, text: str, stdin: str | None = None) -> CommandResult:
        """Run a line in a new shell, after the earlier exports."""
        done = subprocess.run(
            ["bash", "-c", "\n".join(["set -e -o pipefail", *self.exports, text])],
            cwd=self.directory,
            env=os.environ | self.environment | {"KUBECONFIG": str(account.kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def validate(self, command: Command) -> None:
        """Check that the API server accepts the objects of the document's `helm install`, without replacements."""
        rendered = self.shell(self.namespace.admin, command.text.replace("helm install", "helm template", 1))
        assert rendered.code == 0, f"{command.source}: {rendered.err}"
        # In another namespace, which has no objects of these names.
        applied = self.shell(self.namespace.admin, "kubectl apply --dry-run=server -n default -f -", rendered.out)
        assert applied.code == 0, f"{command.source}: {applied.err}"

    def check_port_forward(self, account: Account, text: str) -> str:
        """Forward a port of TensorBoard, send a request, and stop, as Ctrl-C does."""
        environment = os.environ | {"KUBECONFIG": str(account.kubeconfig)}
        forward = subprocess.Popen(shlex.split(text), env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert forward.stdout
            port = re.search(r"127\.0\.0\.1:(\d+)", line := forward.stdout.readline())
            assert port, line
            with urllib.request.urlopen(f"http://localhost:{port[1]}/data/environment", timeout=30) as response:
                assert response.status == 200
        finally:
            forward.terminate()
            forward.wait(10)
        return line


def documents() -> dict[str, Path]:
    """Return the documents whose commands are run, by name."""
    guides = {name: ROOT / "tests/e2e/guides" / f"{name}.md" for name in ("aks", "eks")}
    return guides | {"observe": ROOT / "docs/observe.md"}
