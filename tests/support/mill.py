"""Outputs of preprocess that the tests of training read."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from support.commandline import tokenmill
from support.corpus import TOKENIZER

KEPT = (".tokenmill/preprocess/encoders", "tokenizer")


def write(directory: Path, files: dict[str, int], seed: int = 0, keys: tuple[str, ...] = ("text",)) -> Path:
    """Write JSONL files of so many documents."""
    directory.mkdir(parents=True)
    dice = random.Random(seed)
    for name, documents in files.items():
        records = [{key: " ".join(dice.choices(["a", "few", "words", "of", "text"], k=20)) for key in keys}] * documents
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


class Mill:
    """Makes outputs of preprocess; a tokenizer is settled once."""

    def __init__(self, root: Path) -> None:
        """Make them below a directory."""
        self.root = root

    def make(self, name: str, files: dict[str, int], *options: str, tokenizer: Path = TOKENIZER, **how: Any) -> Path:
        """Tokenise made-up files of so many documents; return the output."""
        source, output = write(self.root / f"{name}-text", files, **how), self.root / name
        settled = self.root / f"settled-{tokenizer.name}"
        if settled.exists():
            shutil.copytree(settled, output)
        done = tokenmill("preprocess", source, output, "--tokenizer", tokenizer, *options, "--processes", 1)
        assert done.code == 0, done.err
        if not settled.exists():
            for part in KEPT:
                shutil.copytree(output / part, settled / part)
        return output
