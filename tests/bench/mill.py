"""tokenmill as a person runs it: through its command line, each command a whole process."""

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
"""A worker that plans and then has no share."""


def say(text: str) -> None:
    """Tell the person how far it is."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Setting:
    """What the command line chose, and where everything lies."""

    tokenizers: Path
    cache: Path
    kept: Path
    scratch: Path
    rounds: int
    cpus: Sequence[int]
    alternatives: str | None = None
    megatron: Path | None = None
    megatron_python: str = sys.executable
    quick: bool = False
    _judged: dict[str, Path] = field(default_factory=dict)

    def section(self, name: str) -> "Setting":
        """Return the same with a place of its own for what is made."""
        return replace(self, scratch=self.kept / name)

    @property
    def one(self) -> Sequence[int]:
        """The CPU to pin to."""
        return self.cpus[-1:]

    def size(self, full: int, quick: int) -> int:
        """Return a size, or the small one with --quick."""
        return quick if self.quick else full

    @property
    def small(self) -> Corpus:
        """64 MB of mixed text."""
        return mixed(self.cache, self.size(64, 1))

    @property
    def large(self) -> Corpus:
        """512 MB of mixed text."""
        return mixed(self.cache, self.size(512, 4))

    def in_rounds(self, sides: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
        """Run the sides in turn, as often as was asked."""
        return in_rounds(self.rounds, sides, say)

    def fresh(self, name: str) -> Path:
        """Return a path in the scratch directory at which nothing is."""
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
        """Run a stage, and see that it did all of its work now."""
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
        """Run `tokenmill preprocess`, on one CPU unless told otherwise."""
        recipe = ("--tokenizer", self.tokenizers / tokenizer, "--processes", str(processes), *options)
        return self.mill("preprocess", source, output, *recipe, cpus=cpus or self.one, watch=watch)

    def planned(self, tokenizer: str, source: Path | str, name: str = "planned", *options: str | Path) -> Path:
        """Return an output whose plan is made and of which no unit is done."""
        output = self.judged(tokenizer, self.fresh(name))
        arguments = ("--tokenizer", self.tokenizers / tokenizer, *options, *NOTHING_TO_DO)
        run([*TOKENMILL, "preprocess", source, output, *arguments, "--json"])
        return output

    def judged(self, tokenizer: str, output: Path) -> Path:
        """Bring an output as far as the tokenizer: resolved, and the encoders judged, once for all sections."""
        records = Path(".tokenmill", "preprocess", "encoders")
        if tokenizer not in self._judged:
            made = self.kept / f"judged-{tokenizer}"
            arguments = ("--tokenizer", self.tokenizers / tokenizer, *NOTHING_TO_DO, "--json")
            run([*TOKENMILL, "preprocess", self.small.given, made, *arguments])
            self._judged[tokenizer] = made
        for part in (records, Path("tokenizer")):
            shutil.copytree(self._judged[tokenizer] / part, output / part)
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
        """Do the work of a planned output: what each worker of many does. Call `undo` before the next."""
        undo(output)
        return self.preprocess(tokenizer, source, output, *options, processes=processes, cpus=cpus, watch=watch)


def undo(output: Path) -> None:
    """Leave a preprocess output as it is when the plan is made and no unit is done."""
    records = output / ".tokenmill" / "preprocess"
    shutil.rmtree(records / "receipts", ignore_errors=True)
    (records / "manifest.json").unlink(missing_ok=True)
    for path in itertools.chain(output.glob("*.bin"), output.glob("*.idx")):
        path.unlink()


def data_bytes(output: Path) -> int:
    """Return the bytes of the indexed datasets in an output."""
    return sum(path.stat().st_size for kind in ("*.bin", "*.idx") for path in output.glob(kind))
