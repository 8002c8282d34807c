"""A document as its reader types it: its fenced blocks, command by command, and what it says that they print."""

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
"""What the role edit is enough for; volumes, nodes and PyTorchJobs are an administrator's here."""
TOO_EARLY = ("is waiting to start", "not found", "timed out waiting for the condition")
"""What kubectl says of logs before there are any."""


@dataclass(frozen=True)
class Command:
    """A command, its lines joined, and where it stands."""

    text: str
    where: str


@dataclass(frozen=True)
class Block:
    """A block of commands below a heading, and the lines that the document says it prints."""

    heading: str
    commands: tuple[Command, ...]
    prints: tuple[str, ...]


@dataclass(frozen=True)
class Instead:
    """What is typed here in place of what the document says, and why."""

    said: str
    typed: str
    why: str


@dataclass(frozen=True)
class LeftOut:
    """What is not typed here, and why; the objects of a `helm install` are still offered to the API server."""

    said: str
    why: str


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document; `sh` is typed, `text` is what the block before it prints, others are errors."""
    found: list[Block] = []
    heading, fence, begun, held = "", "", 0, [""]
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if fence:
                held.append(line)
            elif line.startswith("#"):
                heading = line.lstrip("# ")
        elif not fence:
            fence, begun, held = line.removeprefix("```"), number, []
        else:
            if fence == "sh":
                found.append(Block(heading, tuple(commands(held, document, begun + 1)), ()))
            else:
                assert fence == "text", f"{document.name}:{begun}: a block of {fence!r} is neither typed nor compared"
                found[-1] = Block(found[-1].heading, found[-1].commands, tuple(held))
            fence = ""
    return found


def commands(lines: Sequence[str], document: Path, number: int) -> list[Command]:
    """Return the commands of a block: a line each, with those that a backslash or <<'END' continues."""
    found: list[Command] = []
    rest = list(lines)
    while rest:
        begun = number + len(lines) - len(rest)
        text = rest.pop(0)
        while text.endswith("\\"):
            text = text.removesuffix("\\").rstrip() + " " + rest.pop(0).lstrip()
        if text.endswith("<<'END'"):
            while not text.endswith("\nEND"):
                text += "\n" + rest.pop(0)
        found.append(Command(text, f"{document.name}:{begun}"))
    return found


def prints(said: str, output: str) -> bool:
    """Tell whether a line of an output is as the document says; `...` stands for anything, blanks for blanks."""
    pattern = ".*".join(re.escape(part) for part in " ".join(said.split()).split("..."))
    return any(re.fullmatch(pattern, " ".join(line.split())) for line in output.splitlines())


class Reader:
    """Who reads a document from its first line to its last and types what it says."""

    def __init__(
        self,
        document: Path,
        namespace: Namespace,
        directory: Path,
        table: Sequence[Instead | LeftOut],
        environment: Mapping[str, str],
        after: Mapping[str, Callable[[], None]],
    ) -> None:
        """Open the document in a clone; `after` the blocks of a heading, something is done that is not typed."""
        self.blocks = blocks(document)
        self.namespace, self.directory, self.table, self.after = namespace, directory, table, after
        self.environment, self.exports = environment, list[str]()
        self.at, self.stopped = 0, ""

    def read_to(self, heading: str) -> None:
        """Type what is not typed yet, to the end of a heading's blocks."""
        end = 1 + max(number for number, block in enumerate(self.blocks) if block.heading == heading)
        while self.at < end:
            assert not self.stopped, f"the reader stopped at {self.stopped}"
            block = self.blocks[self.at]
            self.stopped = block.commands[0].where
            self.read(block)
            self.stopped = ""
            self.at += 1
            if block.heading in self.after and block.heading not in [b.heading for b in self.blocks[self.at :]]:
                self.after[block.heading]()

    def read(self, block: Block) -> None:
        """Type a block and compare what it prints."""
        output = ""
        for command in block.commands:
            if command.text.startswith("helm install"):
                self.offer(command)
            if not any(isinstance(each, LeftOut) and each.said in command.text for each in self.table):
                output += self.type(command)
        missing = [said for said in block.prints if not prints(said, output)]
        assert not missing, f"{block.commands[0].where}: not printed: {missing}\n{output}"

    def type(self, command: Command) -> str:
        """Type a command, which must succeed, and return what it prints."""
        text = command.text
        for each in self.table:
            if isinstance(each, Instead):
                text = text.replace(each.said, each.typed)
        account = self.namespace.user if AS_USER.search(text) else self.namespace.admin
        if text.startswith("export "):
            self.exports.append(text)
            return ""
        if text.startswith("kubectl port-forward"):
            return self.look_through(account, text)
        deadline = time.monotonic() + 90
        while (ended := self.shell(account, text)).code and text.startswith("kubectl logs"):
            if time.monotonic() > deadline or not any(said in ended.err for said in TOO_EARLY):
                break
            time.sleep(0.5)  # as a person would, who typed it too early
        assert ended.code == 0, f"{command.where}: {text}\nexit code {ended.code}\n{ended.out}{ended.err}"
        return ended.out

    def shell(self, account: Account, text: str, given: str | None = None) -> CommandResult:
        """Run a line in a shell of its own, after the exports that were typed."""
        done = subprocess.run(
            ["bash", "-c", "\n".join(["set -e -o pipefail", *self.exports, text])],
            cwd=self.directory,
            env=os.environ | self.environment | {"KUBECONFIG": str(account.kubeconfig)},
            input=given,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def offer(self, command: Command) -> None:
        """Have the API server say whether it takes what a `helm install`, as it stands in the document, would make."""
        rendered = self.shell(self.namespace.admin, command.text.replace("helm install", "helm template", 1))
        assert rendered.code == 0, f"{command.where}: {rendered.err}"
        # Into another namespace, where nothing has these names.
        taken = self.shell(self.namespace.admin, "kubectl apply --dry-run=server -n default -f -", rendered.out)
        assert taken.code == 0, f"{command.where}: {taken.err}"

    def look_through(self, account: Account, text: str) -> str:
        """Begin to forward a port of TensorBoard's, ask there, and end it, as Ctrl-C does."""
        environment = os.environ | {"KUBECONFIG": str(account.kubeconfig)}
        forward = subprocess.Popen(shlex.split(text), env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert forward.stdout
            port = re.search(r"127\.0\.0\.1:(\d+)", line := forward.stdout.readline())
            assert port, line
            with urllib.request.urlopen(f"http://localhost:{port[1]}/data/environment", timeout=30) as answer:
                assert answer.status == 200
        finally:
            forward.terminate()
            forward.wait(10)
        return line


def documents() -> dict[str, Path]:
    """Return the documents that follow a guide."""
    return {name: ROOT / "docs" / f"{name}.md" for name in ("aks", "eks")}
