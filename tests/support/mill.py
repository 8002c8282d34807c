"""Outputs of preprocess, for the tests of training."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from support.commandline import tokenmill
from support.corpus import TOKENIZER

TOKENIZER_PARTS = (".tokenmill/preprocess/encoders", "tokenizer")


def write(directory: Path, files: dict[str, int], seed: int = 0, keys: tuple[str, ...] = ("text",)) -> Path:
    """Write JSONL files with these numbers of documents."""
    directory.mkdir(parents=True)
    dice = random.Random(seed)
    for name, documents in files.items():
        records = [{key: " ".join(dice.choices(["a", "few", "words", "of", "text"], k=20)) for key in keys}] * documents
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


class Mill:
    """A factory of preprocess outputs, which resolves each tokenizer only once."""

    def __init__(self, root: Path) -> None:
        """Create the factory; the outputs are below a directory."""
        self.root = root

    def make(
        self, name: str, files: dict[str, int], *options: str, tokenizer: Path = TOKENIZER, **text_options: Any
    ) -> Path:
        """Tokenize generated files with these numbers of documents; return the output."""
        source, output = write(self.root / f"{name}-text", files, **text_options), self.root / name
        resolved = self.root / f"resolved-{tokenizer.name}"
        if resolved.exists():
            shutil.copytree(resolved, output)
        result = tokenmill("preprocess", source, output, "--tokenizer", tokenizer, *options, "--processes", 1)
        assert result.code == 0, result.err
        if not resolved.exists():
            for part in TOKENIZER_PARTS:
                shutil.copytree(output / part, resolved / part)
        return output
