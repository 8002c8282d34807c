"""Train the tokenizer of `tokenmill sample`: `python tools/train_sample_tokenizer.py [DIRECTORY]`.

A byte-level BPE of 8,192 entries with GPT-2's pre-tokenizer, small enough to ship and of the kind that
all three encoders take. The result is committed as package data and need not be made again: another
interpreter's corpus would give another vocabulary.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tokenmill.pipelines.sample
from tokenmill.pipelines.sample.harvest import harvest
from tokenmill.records.readers import read_documents

VOCABULARY = 8192
EOS = "<|endoftext|>"
TOKENIZER = Path(tokenmill.pipelines.sample.__path__[0]) / "tokenizer"


def train(directory: Path) -> None:
    """Train on the harvest's training split and write tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with tempfile.TemporaryDirectory() as corpus:
        harvest(Path(corpus))
        tokenizer.train_from_iterator(_texts(Path(corpus)), trainer)
    config = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    directory.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _texts(corpus: Path) -> Iterator[str]:
    for shard in sorted(corpus.glob("train/**/*.zst")):
        for batch in read_documents(shard, ["text"], display=shard.name, on_bad="fail"):
            yield from (text for text in batch.texts[0] if isinstance(text, str))


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER)
