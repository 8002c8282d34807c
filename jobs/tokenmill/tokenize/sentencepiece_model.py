"""A tokenizer whose only vocabulary is a SentencePiece model: SentencePiece's ids, and an equivalent tokenizer.json.

transformers converts such a model with its own rules, and gives other ids than SentencePiece for spaces and for
characters that the model's normalizer joins. `tokenize.resolve` therefore uses SentencePiece itself as the reference.
The parity gate checks fast encoders with the converted tokenizer.json, and training loads this file.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError

FILE_NAME = "sentencepiece.model"
"""Name of the model next to backend.json. If the file exists, SentencePiece is the reference, not Hugging Face."""

MODEL_NAMES = ("tokenizer.model", "spiece.model")
SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2


class SentencePieceEncoding(list[int]):
    """A list of ids with the attribute of a Hugging Face encoding that the gate reads."""

    @property
    def ids(self) -> list[int]:
        """Return the ids."""
        return self


def find_only_model(directory: Path) -> Path | None:
    """Return the SentencePiece model of a tokenizer; None if there is no model or another vocabulary file."""
    if any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        return None
    return next((path for name in MODEL_NAMES if (path := directory / name).exists() and _is_model(path)), None)


def _is_model(path: Path) -> bool:
    """Return whether a file is a SentencePiece model; tiktoken's list of base64 text and ranks has the same name."""
    with path.open("rb") as file:
        line = file.readline(4096)
    return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", line) is None


def load_processor(path: Path) -> Any:
    """Load SentencePiece's processor of a model."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path))


class SentencePieceModel:
    """A SentencePiece model: its pieces, their types and its normalizer."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the model; raise RequestError if the file is not a SentencePiece model."""
        from importlib import import_module  # neither module has type annotations

        schema: Any = import_module("sentencepiece.sentencepiece_model_pb2")
        decode_error: type[Exception] = import_module("google.protobuf.message").DecodeError
        self._proto = schema.ModelProto()
        try:
            self._proto.ParseFromString(path.read_bytes())
            self.processor = load_processor(path)
        except (decode_error, RuntimeError, OSError) as error:
            raise RequestError(
                f"{path.name} of the tokenizer {name} is not a SentencePiece model ({str(error)[:200]}); copy or "
                "download the file again, or use a directory with a tokenizer.json"
            ) from error
        self._name = name
        self.pieces = [piece.piece for piece in self._proto.pieces]
        self._types = [piece.type for piece in self._proto.pieces]

    def pieces_of_type(self, *types: int) -> list[str]:
        """Return the pieces of these types, in the order of their ids."""
        return [piece for piece, piece_type in zip(self.pieces, self._types, strict=True) if piece_type in types]

    @property
    def control_symbols(self) -> list[str]:
        """Return the symbols that are never part of encoded text: start and end of a sentence, padding and others."""
        return self.pieces_of_type(_CONTROL)

    @property
    def symbols(self) -> list[str]:
        """Return the control symbols and the user-defined symbols, which the texts of the gate contain."""
        return self.pieces_of_type(_CONTROL, _USER)

    @property
    def eos(self) -> str | None:
        """Return the end-of-sentence piece; None if the model has no such piece."""
        number = self._proto.trainer_spec.eos_id
        return self.pieces[number] if 0 <= number < len(self.pieces) else None

    def encode(self, texts: Sequence[str], before: list[int], after: list[int]) -> list[SentencePieceEncoding]:
        """Encode texts with SentencePiece, with additional ids before and after each text."""
        return [
            SentencePieceEncoding([*before, *ids, *after]) for ids in self.processor.encode(list(texts), num_threads=1)
        ]

    def to_tokenizer(self, before: list[int], after: list[int], *, with_special_tokens: bool) -> Any:
        """Return the model as a tokenizers.Tokenizer, `with_special_tokens` for its control symbols."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors

        trainer, rules = self._proto.trainer_spec, self._proto.normalizer_spec
        tokenizer = Tokenizer(self._to_model())
        steps: list[Any] = []
        if rules.precompiled_charsmap:
            steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
        if rules.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        user_symbols = self.pieces_of_type(_USER)
        if rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix and user_symbols:
            # A normalizer also changes the user-defined symbols that the tokenizer searches for. The lookahead excludes
            # a text that is one symbol only.
            alternatives = "|".join(map(re.escape, user_symbols))
            steps.append(normalizers.Replace(Regex(rf"(?m)\A(?!(?:{alternatives})\z)(?=.)"), SPACE))
        elif rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix:
            steps.append(normalizers.Prepend(SPACE))
        elif rules.add_dummy_prefix:
            steps.append(normalizers.Replace(Regex(r"(?m)(?<=.)\z"), SPACE))
        if rules.escape_whitespaces:
            steps.append(normalizers.Replace(" ", SPACE))
        tokenizer.normalizer = normalizers.Sequence(steps) if steps else None
        tokenizer.add_tokens([AddedToken(piece, normalized=True, special=False) for piece in user_symbols])
        if with_special_tokens:
            tokenizer.add_special_tokens(
                [AddedToken(p, normalized=False) for p in self.pieces_of_type(_CONTROL, _UNKNOWN)]
            )
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if rules.add_dummy_prefix and not trainer.treat_whitespace_as_suffix:
            parts.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(parts)
        single = [*(self.pieces[number] for number in before), "$A", *(self.pieces[number] for number in after)]
        if before or after:
            tokens = sorted({(self.pieces[number], number) for number in (*before, *after)})
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
        return tokenizer

    def _to_model(self) -> Any:
        """Return the vocabulary; pieces that text must not become have no merge, or a score below all others."""
        from tokenizers import models

        trainer, pieces = self._proto.trainer_spec, self._proto.pieces
        unknown = self._types.index(_UNKNOWN)
        if trainer.model_type == _UNIGRAM:
            normal_scores = [piece.score for piece in pieces if piece.type == _NORMAL]
            lowest_score = min(normal_scores, default=0.0) - 1000
            scores = [(piece.piece, piece.score if piece.type == _NORMAL else lowest_score) for piece in pieces]
            return models.Unigram(scores, unk_id=unknown, byte_fallback=trainer.byte_fallback)
        if trainer.model_type != _BPE:
            raise RequestError(
                f"the SentencePiece model of the tokenizer {self._name} has the type word or char; use a model of the "
                "type unigram or bpe"
            )
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        mergeable = set(self.pieces_of_type(_NORMAL, _UNUSED))
        ranked = sorted((p for p in pieces if p.piece in mergeable), key=lambda piece: -piece.score)
        merges = [
            (piece[:cut], piece[cut:])
            for piece in (item.piece for item in ranked)
            for cut in range(1, len(piece))
            if piece[:cut] in mergeable and piece[cut:] in mergeable
        ]
        return models.BPE(
            ids, merges, unk_token=self.pieces[unknown], fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
