"""The tokenizer and the encoder of a stage that writes pairs: the planner resolves and stores them, workers load them.

    <output>/tokenizer/                                       the tokenizer's files; training loads them, offline
    <output>/.tokenmill/STAGE/encoders/<fingerprint>/         backend.json and encoder.json (`tokenize.merges`), their
                                                              hashes, a verdict for each way to choose an encoder, and
                                                              the ResolvedTokenizer, which a plan with other parameters
                                                              uses again; the special tokens that a text can contain
                                     ... <fingerprint>-split/ the same if encoders treat these tokens as text, and
                                                              full.json, the backend with these tokens

The name of a directory contains the backend's fingerprint, so that workers of a replaced plan and of the new plan never
use the same directory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.hashing import has_sha256, sha256_of
from tokenmill.datasets.contract import PairBasis, parse_basis, parse_tokenizer
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Plan, StageRecord
from tokenmill.errors import RequestError, TransientError
from tokenmill.records.readers import first_documents
from tokenmill.tokenize import merges
from tokenmill.tokenize.gate import Verdict, fallback_warning, is_installed
from tokenmill.tokenize.options import EncodingOptions, PreprocessOptions
from tokenmill.tokenize.tokenizer import (
    GateTexts,
    ResolvedTokenizer,
    added_eod_warning,
    eod_warning,
    resolve_tokenizer,
    versions,
)
from tokenmill.tokenize.workers.encoder_process import Task

if TYPE_CHECKING:
    from tokenmill.tokenize.gate import Verdict
    from tokenmill.tokenize.records_encoding import RecordEncoding
    from tokenmill.tokenize.tokenizer import ResolvedTokenizer
    from tokenmill.tokenize.workers.encoder_process import Task

T = TypeVar("T")

HASHES_FILE = "hashes.json"
"""Name of the record with the SHA-256 of the files that encoders load, and of EXTRA_FILES."""

EXTRA_FILES = ("special.json", "full.json")
"""Files that encoders do not load: the special tokens, and the backend with these tokens."""

MAX_GATE_FILES, MAX_GATE_DOCUMENTS, MAX_GATE_BYTES = 8, 25, 128 << 10
"""Sample of the corpus for the parity gate: number of files, and documents and bytes of each file."""


class EncodingMode(NamedTuple):
    """How encoders treat special tokens: add them around texts, and split those in texts like ordinary text."""

    special_tokens: bool
    split: bool


def encoding_mode(basis: PairBasis) -> EncodingMode:
    """Return the encoding mode of a plan."""
    return EncodingMode(basis.special_tokens, basis.special_in_text == "split")


@dataclass(frozen=True)
class Encoders:
    """The encoders of one stage."""

    record: StageRecord

    def directory(self, fingerprint: str, mode: EncodingMode) -> Path:
        """Return the directory of a tokenizer; the mode split has a directory of its own."""
        return self.record.directory / "encoders" / f"{fingerprint[:16]}{'-split' if mode.split else ''}"

    def backend(self, basis: PairBasis) -> Path:
        """Return the backend JSON with all tokens of a plan's tokenizer, which decodes ids to text."""
        mode = encoding_mode(basis)
        path = self.directory(basis.tokenizer, mode) / ("full.json" if mode.split else "backend.json")
        self.record.tree.size(path)  # refuses a link
        return self.record.tree.local(path)

    def ready(self, plan: Plan, encoder: str) -> bool:
        """Return whether the output contains the plan's tokenizer, and a valid verdict for the encoder."""
        basis = parse_basis(plan)
        files_present = self._has_tokenizer_files(parse_tokenizer(plan).files)
        return files_present and self._verdict(basis.tokenizer, encoding_mode(basis), encoder) is not None

    def copy_from(self, other: "Encoders", plan: Plan) -> None:
        """Copy the tokenizer of a plan from another output: its files, and what decodes ids."""
        basis, tree = parse_basis(plan), self.record.tree
        self._copy_tokenizer(other.record.output / "tokenizer", parse_tokenizer(plan).files)
        source, target = (store.directory(basis.tokenizer, encoding_mode(basis)) for store in (other, self))
        for name in other.record.tree.names(source):
            tree.write_atomic(target / name, other.record.tree.read(source / name) or b"")

    def task(self, plan: Plan, options: EncodingOptions, records: "RecordEncoding | None" = None) -> "Task":
        """Return the task of the encoder processes, with the encoder that the gate accepted."""
        basis = parse_basis(plan)
        mode = encoding_mode(basis)
        directory = self.directory(basis.tokenizer, mode)
        verdict = self._verdict(basis.tokenizer, mode, options.encoder)
        if verdict is None:
            raise TransientError(
                f"{directory} contains no result of the encoder check for --encoder {options.encoder} and the "
                "installed versions; run the same command again"
            )
        return Task(
            verdict.encoder,
            str(self.record.tree.local(directory) / "backend.json"),
            mode.special_tokens,
            verdict.guard,
            tuple(basis.keys),
            basis.eod,
            options.verify_encoder,
            () if mode.split or records else self._special(directory),
            records,
        )

    def _special(self, directory: Path) -> tuple[str, ...]:
        """Return the special tokens that a text can contain; an earlier version of tokenmill stored no list of them."""
        tokens = read_json(directory / "special.json", tree=self.record.tree)
        if tokens is None:
            added = (read_json(directory / "backend.json", tree=self.record.tree) or {}).get("added_tokens", [])
            tokens = [token["content"] for token in added if token["special"]]
        return tuple(token for token in tokens if isinstance(token, str))

    def _verdict(self, fingerprint: str, mode: EncodingMode, encoder: str) -> "Verdict | None":
        directory = self.directory(fingerprint, mode)
        path = directory / _verdict_name(mode, encoder)
        value = read_json(path, tree=self.record.tree)
        if not value or not self._hashes_match(directory):
            return None
        verdict = _convert_record(Verdict, value, path)
        return verdict if is_installed(verdict.encoder, verdict.version) else None

    def _hashes_match(self, directory: Path) -> bool:
        """Return whether a directory contains the files that the gate checked: the same names and the same bytes."""
        tree = self.record.tree
        hashes = read_json(directory / HASHES_FILE, tree=tree)
        present = {
            name for name in (*merges.LOADED_FILE_NAMES, *EXTRA_FILES) if tree.size(directory / name) is not None
        }
        return (
            isinstance(hashes, dict)
            and hashes.keys() == present != set()
            and all(has_sha256(tree, directory / name, sha256) for name, sha256 in hashes.items())
        )

    def resolve(
        self,
        texts: GateTexts,
        options: EncodingOptions,
        requested: object,
        endpoint: str | None,
        reporter: Reporter,
    ) -> "ResolvedTokenizer":
        """Return the stored tokenizer of the same request, or resolve the tokenizer and run the parity gate."""
        request = {
            "tokenizer": requested,
            "eod_token": options.eod_token,
            "need_eod": options.append_eod,
            "special_tokens": options.special_tokens,
            "encoder": options.encoder,
            "versions": versions(),
            **options.choices(),
        }
        name = f"settled-{content_id(request)[:16]}.json"
        mode = EncodingMode(options.special_tokens, options.special_in_text == "split")
        stored = self._find_stored(name, mode, options.encoder)
        tokenizer, verdict = stored or self._resolve(texts, options, mode, name, endpoint, reporter)
        eod_warnings = (eod_warning(tokenizer), added_eod_warning(tokenizer)) if options.append_eod else ()
        for warning in (*tokenizer.notes, fallback_warning(verdict), *eod_warnings):
            if warning:
                reporter.warn(warning)
        reporter.detail(
            f"tokenizer {tokenizer.reference}: encoder {verdict.encoder} passed the encoder check "
            f"({verdict.checked:,} texts)"
        )
        return tokenizer

    def _find_stored(self, name: str, mode: EncodingMode, encoder: str) -> "tuple[ResolvedTokenizer, Verdict] | None":
        directory, tree = self.record.directory / "encoders", self.record.tree
        for fingerprint in tree.names(directory):
            path = directory / fingerprint / name
            value = read_json(path, tree=tree)
            if not value:
                continue
            tokenizer = _convert_record(ResolvedTokenizer, value, path)
            verdict = self._verdict(tokenizer.fingerprint, mode, encoder)
            if verdict is not None and self._has_tokenizer_files(tokenizer.files):
                return tokenizer, verdict
        return None

    def _has_tokenizer_files(self, files: dict[str, str]) -> bool:
        """Return whether the output contains the tokenizer's files with these SHA-256."""
        tree, directory = self.record.tree, self.record.output / "tokenizer"
        return all(has_sha256(tree, directory / name, sha256) for name, sha256 in files.items())

    def _resolve(
        self,
        texts: GateTexts,
        options: EncodingOptions,
        mode: EncodingMode,
        name: str,
        endpoint: str | None,
        reporter: Reporter,
    ) -> "tuple[ResolvedTokenizer, Verdict]":
        import tempfile

        try:
            temporary_directory = tempfile.gettempdir()
        except FileNotFoundError as error:
            raise RequestError(f"{error.strerror}; set TMPDIR to a directory that this user may write to") from error
        with tempfile.TemporaryDirectory(dir=temporary_directory, prefix="tokenmill-") as scratch:
            resolved = Path(scratch) / "made"
            tokenizer, verdict = resolve_tokenizer(
                options.tokenizer,
                options.tokenizer_revision,
                eod_token=options.eod_token,
                need_eod=options.append_eod,
                add_special_tokens=options.special_tokens,
                texts=texts,
                destination=resolved,
                scratch=Path(scratch),
                encoder=options.encoder,
                endpoint=endpoint,
                source=options.tokenizer_source,
                special_in_text=options.special_in_text,
                log=reporter.log,
                detail=reporter.detail,
                use_cache=True,
            )
            self._copy_tokenizer(resolved / "tokenizer", tokenizer.files)
            directory, tree = self.directory(tokenizer.fingerprint, mode), self.record.tree
            # The gate writes no encoder.json for --encoder hf. The file of another --encoder remains for its verdict.
            hashes = dict(read_json(directory / HASHES_FILE, tree=tree) or {}) if self._hashes_match(directory) else {}
            for file_name in (*merges.LOADED_FILE_NAMES, *EXTRA_FILES):
                if (resolved / file_name).exists():
                    tree.write_atomic(directory / file_name, (resolved / file_name).read_bytes())
                    hashes[file_name] = sha256_of(resolved / file_name)
                elif file_name not in hashes:
                    tree.unlink(directory / file_name)
            tree.write_atomic(directory / HASHES_FILE, readable_json(hashes))
        tree.write_atomic(directory / _verdict_name(mode, options.encoder), readable_json(verdict.to_json()))
        tree.write_atomic(directory / name, readable_json(tokenizer.to_json()))
        return tokenizer, verdict

    def _copy_tokenizer(self, source: Path, files: dict[str, str]) -> None:
        """Copy the tokenizer into the output; raise RequestError for an existing file that tokenmill did not write."""
        old_files = self._recorded_files()
        target, tree = self.record.output / "tokenizer", self.record.tree
        for name in files:
            data, path = (source / name).read_bytes(), target / name
            if name not in old_files and tree.read(path) not in (None, data):
                raise RequestError(
                    f"{path} exists, and no record shows that tokenmill made it; move it away, or choose another output"
                )
            tree.write_atomic(path, data, directory=self.record.directory)
        for name in old_files - set(files):
            tree.unlink(target / name)

    def _recorded_files(self) -> set[str]:
        """Return the names of the tokenizer's files that a plan or an attempt to plan wrote."""
        plan, tree = self.record.read_plan(), self.record.tree
        names = set(parse_tokenizer(plan).files) if plan else set()
        directory = self.record.directory / "encoders"
        for fingerprint in tree.names(directory):
            for name in tree.names(directory / fingerprint):
                if name.startswith("settled-"):
                    path = directory / fingerprint / name
                    names |= set(_convert_record(ResolvedTokenizer, read_json(path, tree=tree), path).files)
        return names


def _verdict_name(mode: EncodingMode, encoder: str) -> str:
    return f"verdict-{encoder}{'' if mode.special_tokens else '-no-special'}.json"


def first_texts(paths: Sequence[Path], options: PreprocessOptions) -> list[str]:
    """Return the first texts of some files, for the parity gate."""
    texts: list[str] = []
    for path in paths[:MAX_GATE_FILES]:
        for key in options.key_names:
            texts += first_documents(path, key, MAX_GATE_DOCUMENTS, MAX_GATE_BYTES, settings=options.reading())
    return texts


def _convert_record(kind: "type[T]", value: Any, path: Path) -> "T":
    """Convert a stored record; raise RequestError if another version or another program changed its form."""
    from msgspec import ValidationError

    from tokenmill.core.typed_json import convert_json

    try:
        return convert_json(value, kind)
    except ValidationError as error:
        raise RequestError(
            f"{path} is damaged, or another program changed it ({error}); find the cause, delete {path.parent}, and "
            "run the same command again, which checks the encoders again"
        ) from error
