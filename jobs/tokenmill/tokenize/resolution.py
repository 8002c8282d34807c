"""The request and the results of a resolution, also between the planner and its subprocess (`tokenize.resolve`)."""

import json
from typing import Literal, NamedTuple

from msgspec import Struct

from tokenmill.core.files.codec import readable_json
from tokenmill.engine.contract import Record
from tokenmill.tokenize.gate import Verdict


class TokenizerRequest(Struct, frozen=True):
    """The options that determine how a tokenizer is loaded and checked; the parameters of `resolve_tokenizer`.

    `texts` are those of the corpus for the parity gate.
    """

    reference: str
    eod_token: str | None
    need_eod: bool
    add_special_tokens: bool
    encoder: str
    source: str | None
    special_in_text: str
    texts: list[str] = []


class LoadedFields(Record, frozen=True):
    """The fields of `ResolvedTokenizer` that only the loaded tokenizer has."""

    fingerprint: str
    vocab_size: int
    max_token_id: int
    dtype: Literal["uint16", "int32"]
    eod_id: int | None
    eod_token: str | None
    eos_token: str | None
    bos_token: str | None
    added: tuple[str, ...]
    eod_candidates: tuple[str, ...]
    adds_eod: bool = False
    notes: tuple[str, ...] = ()


class ResolveOutcome(Struct, frozen=True):
    """The fields of a tokenizer and the special tokens that a text can contain, or the reason of a refusal."""

    fields: LoadedFields | None = None
    special: list[str] = []
    error: str = ""


class TokenizerResolution(NamedTuple):
    """The result of the subprocesses: the tokenizer's files, the backend files, and the fields of the tokenizer."""

    files: dict[str, bytes]
    backends: dict[str, bytes]
    fields: LoadedFields
    special_tokens: list[str]
    verdict: Verdict

    def to_files(self) -> dict[str, bytes]:
        """Return the resolution as the files of a cache entry."""
        about = {"fields": self.fields.to_json(), "special": self.special_tokens, "verdict": self.verdict.to_json()}
        return {
            "about.json": readable_json(about),
            **{f"tokenizer-{name}": data for name, data in self.files.items()},
            **{f"backend-{name}": data for name, data in self.backends.items()},
        }

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> "TokenizerResolution":
        """Return the resolution in the files of a cache entry.

        Raises:
            ValueError, KeyError, TypeError: the entry is invalid.
        """
        about = json.loads(files["about.json"])

        def select(prefix: str) -> dict[str, bytes]:
            return {name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)}

        fields, verdict = LoadedFields.from_json(about["fields"]), Verdict.from_json(about["verdict"])
        return cls(select("tokenizer-"), select("backend-"), fields, about["special"], verdict)
