"""A tokenizer that is a SentencePiece model alone: its own ids, and a tokenizer.json that says the same.

transformers converts such a model by rules of its own, and gives other ids than SentencePiece on spaces and on
what its normalizer joins. `tokens.resolve` therefore takes SentencePiece itself as the reference; the converted form
is what fast encoders are judged with, and what training loads.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError

NAME = "sentencepiece.model"
"""The model's name beside backend.json: where it is there, it is the reference rather than Hugging Face."""

MODELS = ("tokenizer.model", "spiece.model")
SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2


class Ids(list[int]):
    """Ids in the form of a Hugging Face encoding, as far as the gate reads it."""

    @property
    def ids(self) -> list[int]:
        """Return them."""
        return self


def only_model(directory: Path) -> Path | None:
    """Return the SentencePiece model of a tokenizer that has no other vocabulary file, None where there is none."""
    if any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        return None
    return next((path for name in MODELS if (path := directory / name).exists() and _is_model(path)), None)


def _is_model(path: Path) -> bool:
    """Tell a SentencePiece model from a list of tiktoken's ranks, which has the same name: base64 text and numbers."""
    with path.open("rb") as file:
        line = file.readline(4096)
    return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", line) is None


def load(path: Path) -> Any:
    """Load a model's own processor."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path))


class SentencePieceModel:
    """A model as it was trained: pieces, kinds, normalizer."""

    def __init__(self, path: Path, name: str) -> None:
        """Read it; RequestError where it is none."""
        from importlib import import_module  # neither has types

        schema: Any = import_module("sentencepiece.sentencepiece_model_pb2")
        damaged: type[Exception] = import_module("google.protobuf.message").DecodeError
        self._proto = schema.ModelProto()
        try:
            self._proto.ParseFromString(path.read_bytes())
            self.processor = load(path)
        except (damaged, RuntimeError, OSError) as error:
            raise RequestError(
                f"{path.name} of the tokenizer {name} is no SentencePiece model ({str(error)[:200]}); copy or download "
                "it again, or give a directory with a tokenizer.json"
            ) from error
        self._name = name
        self.pieces = [piece.piece for piece in self._proto.pieces]
        self._kinds = [piece.type for piece in self._proto.pieces]

    def of_kind(self, *kinds: int) -> list[str]:
        """Return the pieces of some kinds, in order of their ids."""
        return [piece for piece, kind in zip(self.pieces, self._kinds, strict=True) if kind in kinds]

    @property
    def special(self) -> list[str]:
        """Return what text cannot spell: the beginning and end of a sentence, padding, other control symbols."""
        return self.of_kind(_CONTROL)

    @property
    def spelled(self) -> list[str]:
        """Return control symbols and user-defined ones, which texts of the gate spell."""
        return self.of_kind(_CONTROL, _USER)

    @property
    def eos(self) -> str | None:
        """Return the piece that ends a sentence."""
        number = self._proto.trainer_spec.eos_id
        return self.pieces[number] if 0 <= number < len(self.pieces) else None

    def encode(self, texts: Sequence[str], before: list[int], after: list[int]) -> list[Ids]:
        """Encode texts as SentencePiece does, with ids around each."""
        return [Ids([*before, *ids, *after]) for ids in self.processor.encode(list(texts), num_threads=1)]

    def converted(self, before: list[int], after: list[int], *, special: bool) -> Any:
        """Return the model as a tokenizers.Tokenizer; with `special`, control symbols are special tokens of it."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors

        trainer, rules = self._proto.trainer_spec, self._proto.normalizer_spec
        tokenizer = Tokenizer(self._model())
        steps: list[Any] = []
        if rules.precompiled_charsmap:
            steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
        if rules.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        own = self.of_kind(_USER)
        if rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix and own:
            # As a normalizer changes the user-defined symbols, too, where they are looked for: not alone ones.
            alone = "|".join(map(re.escape, own))
            steps.append(normalizers.Replace(Regex(rf"(?m)\A(?!(?:{alone})\z)(?=.)"), SPACE))
        elif rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix:
            steps.append(normalizers.Prepend(SPACE))
        elif rules.add_dummy_prefix:
            steps.append(normalizers.Replace(Regex(r"(?m)(?<=.)\z"), SPACE))
        if rules.escape_whitespaces:
            steps.append(normalizers.Replace(" ", SPACE))
        tokenizer.normalizer = normalizers.Sequence(steps) if steps else None
        tokenizer.add_tokens([AddedToken(piece, normalized=True, special=False) for piece in own])
        if special:
            tokenizer.add_special_tokens([AddedToken(p, normalized=False) for p in self.of_kind(_CONTROL, _UNKNOWN)])
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix:
            parts.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(parts)
        single = [*(self.pieces[number] for number in before), "$A", *(self.pieces[number] for number in after)]
        if before or after:
            tokens = sorted({(self.pieces[number], number) for number in (*before, *after)})
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
        return tokenizer

    def _model(self) -> Any:
        """Return the vocabulary; what text may not become has no merge, or a score below all others."""
        from tokenizers import models

        trainer, pieces = self._proto.trainer_spec, self._proto.pieces
        unknown = self._kinds.index(_UNKNOWN)
        if trainer.model_type == _UNIGRAM:
            usual = [piece.score for piece in pieces if piece.type == _NORMAL]
            never = min(usual, default=0.0) - 1000
            scores = [(piece.piece, piece.score if piece.type == _NORMAL else never) for piece in pieces]
            return models.Unigram(scores, unk_id=unknown, byte_fallback=trainer.byte_fallback)
        if trainer.model_type != _BPE:
            raise RequestError(
                f"the SentencePiece model of the tokenizer {self._name} is of words or characters; give one of type "
                "unigram or bpe"
            )
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        whole = set(self.of_kind(_NORMAL, _UNUSED))
        ranked = sorted((p for p in pieces if p.piece in whole), key=lambda piece: -piece.score)
        merges = [
            (piece[:cut], piece[cut:])
            for piece in (item.piece for item in ranked)
            for cut in range(1, len(piece))
            if piece[:cut] in whole and piece[cut:] in whole
        ]
        return models.BPE(
            numbers, merges, unk_token=self.pieces[unknown], fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
