"""The tokenizer and encoder of a preprocess stage: resolved and judged by its planner, loaded by its workers.

    <output>/tokenizer/                                       the tokenizer's files; training loads these, offline
    <output>/.tokenmill/preprocess/encoders/<fingerprint>/    backend.json and encoder.json (`tokens.merges`), their
                                                              hashes, a verdict for each way of choosing an encoder,
                                                              and what was settled, so that a plan with other
                                                              parameters need not resolve it again; the special
                                                              tokens that text can spell
                                     ... <fingerprint>-split/ the same where those are encoded as text, and full.json,
                                                              the backend that has them

A directory is named for the backend's fingerprint, so that workers of a replaced plan and of its
successor never meet in one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenmill.corpus.readers import first_documents
from tokenmill.errors import RequestError, TransientError
from tokenmill.files.codec import content_id, read_json, readable_json
from tokenmill.files.hashing import has_sha256, sha256_of
from tokenmill.flow.progress import Reporter
from tokenmill.flow.record import Plan, StageRecord
from tokenmill.tokens import merges
from tokenmill.tokens.contract import PairBasis, basis_of, tokenizer_of
from tokenmill.tokens.gate import Verdict, fallback_warning, is_installed
from tokenmill.tokens.options import PreprocessOptions
from tokenmill.tokens.tokenizer import ResolvedTokenizer, added_eod_warning, eod_warning, resolve_tokenizer, versions
from tokenmill.tokens.workers.encoder_process import Task

if TYPE_CHECKING:
    from tokenmill.tokens.gate import Verdict
    from tokenmill.tokens.tokenizer import ResolvedTokenizer
    from tokenmill.tokens.workers.encoder_process import Task

T = TypeVar("T")

HASHES = "hashes.json"
"""Name of the record with the SHA-256 of the files that encoders load, and of those beside them."""

BESIDE = ("special.json", "full.json")
"""What is kept beside the files that encoders load: the special tokens, and the backend with them."""

GATE_FILES, GATE_DOCUMENTS, GATE_BYTES = 8, 25, 128 << 10
"""On how much of the corpus the encoders are judged beside the adversarial list: documents and bytes of each file."""


class EncodingMode(NamedTuple):
    """How texts are encoded: with special tokens around them, and with those that they spell as ordinary text."""

    special_tokens: bool
    split: bool


def way_of(basis: PairBasis) -> EncodingMode:
    """Return how a plan's texts are encoded."""
    return EncodingMode(basis.special_tokens, basis.special_in_text == "split")


@dataclass(frozen=True)
class Encoders:
    """The encoders of one preprocess stage."""

    record: StageRecord

    def directory(self, fingerprint: str, way: EncodingMode) -> Path:
        """Return the directory of a tokenizer; that without special tokens in its texts is another."""
        return self.record.directory / "encoders" / f"{fingerprint[:16]}{'-split' if way.split else ''}"

    def backend(self, basis: PairBasis) -> Path:
        """Return the backend JSON of a plan's tokenizer that has all its tokens."""
        way = way_of(basis)
        return self.directory(basis.tokenizer, way) / ("full.json" if way.split else "backend.json")

    def ready(self, plan: Plan, encoder: str) -> bool:
        """Tell whether a plan's tokenizer lies beside the data, and workers can load the encoder as it was judged."""
        basis = basis_of(plan)
        placed = self._lies_there(tokenizer_of(plan).files)
        return placed and self._verdict(basis.tokenizer, way_of(basis), encoder) is not None

    def task(self, plan: Plan, options: PreprocessOptions) -> "Task":
        """Return what the encoder processes are to do: with the encoder that the gate chose."""

        basis = basis_of(plan)
        way = way_of(basis)
        directory = self.directory(basis.tokenizer, way)
        verdict = self._verdict(basis.tokenizer, way, options.encoder)
        if verdict is None:
            raise TransientError(
                f"no verdict on encoders for --encoder {options.encoder} in {directory} that holds for the "
                "versions installed here; run the same command again"
            )
        return Task(
            verdict.encoder,
            str(directory / "backend.json"),
            way.special_tokens,
            verdict.guard,
            tuple(basis.keys),
            basis.eod,
            options.verify_encoder,
            () if way.split else self._special(directory),
        )

    def _special(self, directory: Path) -> tuple[str, ...]:
        """Return the special tokens that text can spell; an earlier version kept no list of them."""
        known = read_json(directory / "special.json", tree=self.record.tree)
        if known is None:
            added = (read_json(directory / "backend.json", tree=self.record.tree) or {}).get("added_tokens", [])
            known = [token["content"] for token in added if token["special"]]
        return tuple(token for token in known if isinstance(token, str))

    def _verdict(self, fingerprint: str, way: EncodingMode, encoder: str) -> "Verdict | None":

        directory = self.directory(fingerprint, way)
        path = directory / _verdict_name(way, encoder)
        value = read_json(path, tree=self.record.tree)
        if not value or not self._is_as_judged(directory):
            return None
        verdict = _read_as(Verdict, value, path)
        return verdict if is_installed(verdict.encoder, verdict.version) else None

    def _is_as_judged(self, directory: Path) -> bool:
        """Tell whether what encoders load is what was judged: those files, with those bytes."""

        tree = self.record.tree
        hashes = read_json(directory / HASHES, tree=tree)
        present = {name for name in (*merges.NAMES, *BESIDE) if tree.size(directory / name) is not None}
        return (
            isinstance(hashes, dict)
            and hashes.keys() == present != set()
            and all(has_sha256(tree, directory / name, sha256) for name, sha256 in hashes.items())
        )

    def resolve(
        self,
        beginnings: Sequence[Path],
        options: PreprocessOptions,
        asked: dict[str, Any],
        endpoint: str | None,
        reporter: Reporter,
    ) -> "ResolvedTokenizer":
        """Resolve the tokenizer and judge the encoders on it, unless that was done here before for the same request."""

        question = {
            "tokenizer": asked,
            "eod_token": options.eod_token,
            "need_eod": options.append_eod,
            "special_tokens": options.special_tokens,
            "encoder": options.encoder,
            "versions": versions(),
            **options.choices(),
        }
        name = f"settled-{content_id(question)[:16]}.json"
        way = EncodingMode(options.special_tokens, options.special_in_text == "split")
        found = self._remembered(name, way, options.encoder)
        tokenizer, verdict = found or self._resolve(beginnings, options, way, name, endpoint, reporter.say)
        ends = (eod_warning(tokenizer), added_eod_warning(tokenizer)) if options.append_eod else ()
        for warning in (*tokenizer.notes, fallback_warning(verdict), *ends):
            if warning:
                reporter.warn(warning)
        reporter.say(f"tokenizer {tokenizer.reference}: {verdict.encoder} agrees on {verdict.checked:,} texts; taken")
        return tokenizer

    def _remembered(self, name: str, way: EncodingMode, encoder: str) -> "tuple[ResolvedTokenizer, Verdict] | None":

        directory, tree = self.record.directory / "encoders", self.record.tree
        for fingerprint in tree.names(directory):
            path = directory / fingerprint / name
            value = read_json(path, tree=tree)
            if not value:
                continue
            tokenizer = _read_as(ResolvedTokenizer, value, path)
            verdict = self._verdict(tokenizer.fingerprint, way, encoder)
            if verdict is not None and self._lies_there(tokenizer.files):
                return tokenizer, verdict
        return None

    def _lies_there(self, files: dict[str, str]) -> bool:
        """Tell whether the tokenizer's files lie beside the data with the SHA-256 each is to have."""
        tree, directory = self.record.tree, self.record.output / "tokenizer"
        return all(has_sha256(tree, directory / name, sha256) for name, sha256 in files.items())

    def _resolve(
        self,
        beginnings: Sequence[Path],
        options: PreprocessOptions,
        way: EncodingMode,
        name: str,
        endpoint: str | None,
        say: Callable[[str], None],
    ) -> "tuple[ResolvedTokenizer, Verdict]":
        import tempfile

        try:
            place = tempfile.gettempdir()
        except FileNotFoundError as error:
            raise RequestError(f"{error.strerror}; set TMPDIR to a directory that this user may write") from error
        with tempfile.TemporaryDirectory(dir=place, prefix="tokenmill-") as scratch:
            made = Path(scratch) / "made"
            tokenizer, verdict = resolve_tokenizer(
                options.tokenizer,
                options.tokenizer_revision,
                eod_token=options.eod_token,
                need_eod=options.append_eod,
                add_special_tokens=options.special_tokens,
                texts=_first_texts(beginnings, options),
                destination=made,
                scratch=Path(scratch),
                encoder=options.encoder,
                endpoint=endpoint,
                source=options.tokenizer_source,
                special_in_text=options.special_in_text,
                say=say,
                cached=True,
            )
            self._place(made / "tokenizer", tokenizer.files)
            directory, tree = self.directory(tokenizer.fingerprint, way), self.record.tree
            # Hugging Face judged alone makes no encoder.json: that of an earlier --encoder stays, for its verdict.
            hashes = dict(read_json(directory / HASHES, tree=tree) or {}) if self._is_as_judged(directory) else {}
            for part in (*merges.NAMES, *BESIDE):
                if (made / part).exists():
                    tree.write_atomic(directory / part, (made / part).read_bytes())
                    hashes[part] = sha256_of(made / part)
                elif part not in hashes:
                    tree.unlink(directory / part)
            tree.write_atomic(directory / HASHES, readable_json(hashes))
        tree.write_atomic(directory / _verdict_name(way, options.encoder), readable_json(verdict.to_json()))
        tree.write_atomic(directory / name, readable_json(tokenizer.to_json()))
        return tokenizer, verdict

    def _place(self, made: Path, files: dict[str, str]) -> None:
        """Copy the tokenizer beside the data; a stranger's files are not overwritten."""
        old = self.record.read_plan()
        ours = tokenizer_of(old).files if old else {}
        target, tree = self.record.output / "tokenizer", self.record.tree
        for name in files:
            data, path = (made / name).read_bytes(), target / name
            if name not in ours and tree.read(path) not in (None, data):
                raise RequestError(
                    f"{path} exists, and no record says that tokenmill made it; move it away, or choose another output"
                )
            tree.write_atomic(path, data, directory=self.record.directory)
        for name in set(ours) - set(files):
            tree.unlink(target / name)


def _verdict_name(way: EncodingMode, encoder: str) -> str:
    return f"verdict-{encoder}{'' if way.special_tokens else '-no-special'}.json"


def _first_texts(paths: Sequence[Path], options: PreprocessOptions) -> list[str]:

    texts: list[str] = []
    for path in paths[:GATE_FILES]:
        for key in options.key_names:
            texts += first_documents(path, key, GATE_DOCUMENTS, GATE_BYTES, reading=options.reading())
    return texts


def _read_as(kind: "type[T]", value: Any, path: Path) -> "T":
    """Take a record of what was settled, which may be another version's or somebody else's, as what it is to be."""
    from msgspec import ValidationError, convert

    try:
        return convert(value, kind)
    except ValidationError as error:
        raise RequestError(
            f"{path} is damaged, or somebody changed it ({error}); look at who did, delete {path.parent}, and run the "
            "same command again, which judges the encoders anew"
        ) from error
