"""tokenmill as a user runs it: each command is a process of the command line."""

import itertools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .corpora import Corpus, mixed
from .measure import Failed, Run, in_rounds, run

TOKENMILL = (sys.executable, "-m", "tokenmill")
NOTHING_TO_DO = ("--workers", "100000", "--worker-index", "99999")
"""Options of a worker that plans and then has an empty share."""


def log(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Setting:
    """The choices of the command line, and the directories of inputs and outputs."""

    tokenizers: Path
    cache: Path
    kept: Path
    scratch: Path
    rounds: int
    cpus: Sequence[int]
    alternatives: str | None = None
    megatron: Path | None = None
    megatron_python: str = sys.executable
    loaders: str | None = None
    documents: int = 10_000_000
    layers: int = 32
    quick: bool = False
    _resolved: dict[str, Path] = field(default_factory=dict)

    def section(self, name: str) -> "Setting":
        """Return this setting with a scratch directory for one section."""
        return replace(self, scratch=self.kept / name)

    @property
    def one_cpu(self) -> Sequence[int]:
        """Return the CPU for measurements on one CPU."""
        return self.cpus[-1:]

    def size(self, full: int, quick: int) -> int:
        """Return a size, or the small size with --quick."""
        return quick if self.quick else full

    @property
    def small(self) -> Corpus:
        """Return 64 MB of mixed text."""
        return mixed(self.cache, self.size(64, 1))

    @property
    def large(self) -> Corpus:
        """Return 512 MB of mixed text."""
        return mixed(self.cache, self.size(512, 4))

    def in_rounds(self, sides: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
        """Run the sides in turn, for the requested number of rounds."""
        return in_rounds(self.rounds, sides, log)

    def fresh(self, name: str) -> Path:
        """Return a path in the scratch directory that does not exist."""
        path = self.scratch / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def mill(
        self,
        stage: str,
        source: Path | str,
        output: Path,
        *options: str | Path,
        cpus: Sequence[int] = (),
        watch: bool = False,
        env: Mapping[str, str] = {},
    ) -> Run:
        """Run a stage, and check that it did all of its work in this run."""
        command = [*TOKENMILL, stage, source, output, *options, "--json"]
        done = run(command, cpus=cpus or self.cpus, watch=watch, env=env)
        result = done.result
        if not result["complete"] or result["units_done_now"] != result["units"]:
            raise Failed(f"tokenmill {stage} did not do all of its work: {result}")
        return done

    def preprocess(
        self,
        tokenizer: str,
        source: Path | str,
        output: Path,
        *options: str | Path,
        processes: int = 1,
        cpus: Sequence[int] = (),
        watch: bool = False,
    ) -> Run:
        """Run `tokenmill preprocess`, on one CPU unless `cpus` has more."""
        arguments = ("--tokenizer", self.tokenizers / tokenizer, "--processes", str(processes), *options)
        return self.mill("preprocess", source, output, *arguments, cpus=cpus or self.one_cpu, watch=watch)

    def planned(self, tokenizer: str, source: Path | str, name: str = "planned", *options: str | Path) -> Path:
        """Return an output that has a plan and no finished unit."""
        output = self.with_tokenizer(tokenizer, self.fresh(name))
        arguments = ("--tokenizer", self.tokenizers / tokenizer, *options, *NOTHING_TO_DO)
        run([*TOKENMILL, "preprocess", source, output, *arguments, "--json"])
        return output

    def with_tokenizer(self, tokenizer: str, output: Path) -> Path:
        """Copy a resolved tokenizer and its verdict to an output; both are made once for all sections."""
        records = Path(".tokenmill", "preprocess", "encoders")
        if tokenizer not in self._resolved:
            prepared = self.kept / f"tokenizer-{tokenizer}"
            arguments = ("--tokenizer", self.tokenizers / tokenizer, *NOTHING_TO_DO, "--json")
            run([*TOKENMILL, "preprocess", self.small.input, prepared, *arguments])
            self._resolved[tokenizer] = prepared
        for part in (records, Path("tokenizer")):
            shutil.copytree(self._resolved[tokenizer] / part, output / part)
        return output

    def worker(
        self,
        tokenizer: str,
        source: Path | str,
        output: Path,
        *options: str | Path,
        processes: int = 1,
        cpus: Sequence[int] = (),
        watch: bool = False,
    ) -> Run:
        """Do the work of a planned output, as each of many workers does. Call `undo` before the next run."""
        undo(output)
        return self.preprocess(tokenizer, source, output, *options, processes=processes, cpus=cpus, watch=watch)


def undo(output: Path, stage: str = "preprocess") -> None:
    """Return the output of a stage that writes pairs to its state after planning, without finished units."""
    records = output / ".tokenmill" / stage
    shutil.rmtree(records / "receipts", ignore_errors=True)
    (records / "manifest.json").unlink(missing_ok=True)
    for path in itertools.chain(output.glob("*.bin"), output.glob("*.idx")):
        path.unlink()


def data_bytes(output: Path) -> int:
    """Return the bytes of the indexed datasets in an output."""
    return sum(path.stat().st_size for kind in ("*.bin", "*.idx") for path in output.glob(kind))
