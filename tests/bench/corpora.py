"""The corpora by name: made where they are missing, by a process of its own (see `corpus.py` and `shapes.py`)."""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .measure import MB, Failed

HERE = Path(__file__).parent
SLIMPAJAMA = 59_166
"""Files of SlimPajama's train split."""


@dataclass(frozen=True)
class Corpus:
    """What tokenmill is given; the same texts as one plain .jsonl where something else reads them; how much it is."""

    given: Path
    plain: Path
    about: dict[str, int]

    @property
    def megabytes(self) -> float:
        """Size of the text in 10^6 bytes of UTF-8."""
        return self.about["text_bytes"] / MB


def mixed(cache: Path, megabytes: int) -> Corpus:
    """Return the mixed text; the same Python makes the same."""
    recipe = hashlib.sha256((HERE / "corpus.py").read_bytes()).hexdigest()[:8]
    stem = cache / f"{platform.python_version()}-{megabytes}-{recipe}.jsonl"
    about = stem.with_suffix(".json")
    if not about.exists():
        need(cache, 2 * megabytes * MB)
        make("corpus.py", stem, megabytes)
    return Corpus(Path(f"{stem}.zst"), stem, json.loads(about.read_bytes()))


def shaped(directory: Path, shape: str, base: Corpus, size: int, disk_bytes: int) -> Corpus:
    """Return the text of `base` in another shape, in a directory that only the same shape and base has."""
    recipe = hashlib.sha256((HERE / "shapes.py").read_bytes()).hexdigest()[:8]
    made = directory / f"{base.plain.stem}-{shape}-{size}-{recipe}"
    if not (made / "about.json").exists():
        shutil.rmtree(made, ignore_errors=True)
        need(directory, disk_bytes)
        make("shapes.py", shape, base.plain, made, size)
    files = list((made / "files").iterdir()) if shape in ("huge", "long", "documents") else []
    given = files[0] if files else made / "files"
    return Corpus(given, made / "texts.jsonl", json.loads((made / "about.json").read_bytes()))


def make(script: str, *arguments: str | Path | int) -> None:
    """Run one of the scripts."""
    print(f"making {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(HERE / script), *map(str, arguments)], check=True)


def need(directory: Path, disk_bytes: int) -> None:
    """Raise Failed where a disk has no room for so much."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < disk_bytes:
        raise Failed(
            f"{directory} has {free / 1e9:.1f} GB free, and this takes {disk_bytes / 1e9:.1f} GB; make room, or name "
            "another directory with --cache"
        )
