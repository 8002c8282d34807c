"""The corpora by name; a subprocess makes a missing corpus (see `corpus.py` and `shapes.py`)."""

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
SINGLE_FILE = ("huge", "long", "documents", "chat_4", "chat_16", "chat_short")
"""The shapes that have one file."""
SLIMPAJAMA = 59_166
"""Number of files in SlimPajama's train split."""


@dataclass(frozen=True)
class Corpus:
    """The input of tokenmill, the same texts as a plain .jsonl for alternatives, and the counts of both."""

    input: Path
    plain: Path
    about: dict[str, int]

    @property
    def megabytes(self) -> float:
        """Size of the text in 10^6 bytes of UTF-8."""
        return self.about["text_bytes"] / MB


def mixed(cache: Path, megabytes: int) -> Corpus:
    """Return the mixed text; the same Python version makes the same text."""
    recipe_hash = hashlib.sha256((HERE / "corpus.py").read_bytes()).hexdigest()[:8]
    stem = cache / f"{platform.python_version()}-{megabytes}-{recipe_hash}.jsonl"
    about = stem.with_suffix(".json")
    if not about.exists():
        require_space(cache, 2 * megabytes * MB)
        make("corpus.py", stem, megabytes)
    return Corpus(Path(f"{stem}.zst"), stem, json.loads(about.read_bytes()))


def shaped(directory: Path, shape: str, base: Corpus, size: int, disk_bytes: int) -> Corpus:
    """Return the text of `base` in another shape, in a directory for this shape and base."""
    recipe_hash = hashlib.sha256((HERE / "shapes.py").read_bytes()).hexdigest()[:8]
    output = directory / f"{base.plain.stem}-{shape}-{size}-{recipe_hash}"
    if not (output / "about.json").exists():
        shutil.rmtree(output, ignore_errors=True)
        require_space(directory, disk_bytes)
        make("shapes.py", shape, base.plain, output, size)
    files = list((output / "files").iterdir()) if shape in SINGLE_FILE else []
    input = files[0] if files else output / "files"
    return Corpus(input, output / "texts.jsonl", json.loads((output / "about.json").read_bytes()))


def make(script: str, *arguments: str | Path | int) -> None:
    """Run a script of this directory."""
    print(f"making {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(HERE / script), *map(str, arguments)], check=True)


def require_space(directory: Path, disk_bytes: int) -> None:
    """Raise Failed if the disk of a directory has less free space."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < disk_bytes:
        raise Failed(
            f"{directory} has {free / 1e9:.1f} GB free, but {disk_bytes / 1e9:.1f} GB are needed; free some space, or "
            "choose another directory with --cache"
        )
