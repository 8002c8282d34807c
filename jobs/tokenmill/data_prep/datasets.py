"""The stages of one dataset: which of them run, with which options, in the dataset's directory of the output.

    <output>/datasets/<name>-<hash>/              the output of download, if a remote file is divided between shards
    <output>/datasets/<name>-<hash>/transformed   shards of rows: the result for JSONL, the input of the next stages
    <output>/datasets/<name>-<hash>/preprocessed  pairs of texts
    <output>/datasets/<name>-<hash>/chat          pairs of conversations and their masks

The hash covers all parameters that change the files: other parameters have another directory, and a call with the same
parameters finds its files. The transform is left out where the next stage can read the files of the dataset directly.
`data_prep.run` runs the datasets and puts their results together.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from tokenmill.core.files.codec import content_id
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.hashing import sha256_of
from tokenmill.core.files.paths import safe_name
from tokenmill.core.files.tree import Tree
from tokenmill.data_prep.blend import SourceDataset
from tokenmill.data_prep.config import (
    ChatSftOutputConfig,
    InvalidField,
    JsonlOutputConfig,
    PipelineConfig,
    TokenizerConfig,
)
from tokenmill.data_prep.filters import RowFilter
from tokenmill.data_prep.sources import DatasetSource, find_source, source_options
from tokenmill.datasets.contract import PairBasis, ResolvedTokenizer
from tokenmill.engine.record import Manifest, StageRecord
from tokenmill.engine.run import run_stage
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import find_records
from tokenmill.engine.worker import Summary
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.stage import Chat
from tokenmill.stages.chat.template import BUILTIN
from tokenmill.stages.download import Download
from tokenmill.stages.pairs import FindTokenizer
from tokenmill.stages.preprocess import Preprocess
from tokenmill.stages.registry import CHAT, DOWNLOAD, KINDS, PREPROCESS, TRANSFORM, default_output
from tokenmill.stages.transform.builtin import passthrough
from tokenmill.stages.transform.load import wrap_function
from tokenmill.stages.transform.options import ZSTD, TransformOptions
from tokenmill.stages.transform.shards import count_shards, sample_shards
from tokenmill.stages.transform.stage import TransformRecords
from tokenmill.stages.transform.types import Transform
from tokenmill.tokenize.options import EncodingOptions, PreprocessOptions
from tokenmill.tokenize.stream import Stream

ALL_FILES = Selection(split="any")
"""The files of an earlier stage: the selection of files has applied to their sources."""

MAX_NAME = 80
"""Characters of a dataset's name in the name of its directory."""


@dataclass(frozen=True, kw_only=True)
class PrepareTexts(Preprocess):
    """The stage preprocess, with a check that the tokenizer has the BOS and the vocabulary that are requested."""

    requested: TokenizerConfig
    dtype: str

    def resolve(
        self, paths: Sequence[Path], options: EncodingOptions, find_tokenizer: FindTokenizer
    ) -> tuple[ResolvedTokenizer, PairBasis]:
        """Resolve the tokenizer and check it."""
        tokenizer, basis = super().resolve(paths, options, find_tokenizer)
        if self.requested.add_bos and (tokenizer.bos_token is None or tokenizer.added != (tokenizer.bos_token,)):
            raise InvalidField(
                f"add_bos is True, but the tokenizer {tokenizer.reference} with the BOS {tokenizer.bos_token} adds "
                f"{', '.join(tokenizer.added) or 'no token'} to a text; set add_bos=False, or change the "
                "post-processor in its tokenizer.json"
            )
        if self.dtype == "uint16" != tokenizer.dtype:
            raise InvalidField(
                f"dtype is 'uint16', but the vocabulary of {tokenizer.reference} has {tokenizer.vocab_size:,} entries; "
                "set dtype='int32'"
            )
        return tokenizer, basis


@dataclass(frozen=True)
class OutputShard:
    """A part of a dataset's result: its files by their suffix, and its numbers of tokens and documents or records."""

    files: dict[str, Path]
    tokens: int
    documents: int

    @property
    def size(self) -> int:
        """The size by which the dataset's weight is divided between its shards."""
        return self.tokens or self.documents


@dataclass(frozen=True)
class WorkSettings:
    """Settings of a call that are equal for all datasets.

    `held_out` is the number of shards that validation and test get, and `rows` the number of rows to read of each
    dataset, or None for all.
    """

    config: PipelineConfig
    output: Path
    run: StageRun
    held_out: int = 0
    rows: int | None = None


class DatasetWork:
    """A dataset of the list `split` of a blend, with the stages that make its files."""

    def __init__(self, split: str, dataset: SourceDataset, settings: WorkSettings) -> None:
        """Compute the directory of the dataset from its parameters."""
        self.split = split
        self.dataset = dataset
        self.summaries: list[Summary] = []
        self.source_bytes = 0
        self._settings = settings
        self._config = settings.config
        self._format = settings.config.output.format
        self._function = self._make_function()
        self.hash = content_id(self._describe())
        name = f"{safe_name(dataset.name)[:MAX_NAME]}-{self.hash[:12]}"
        self.directory = settings.output / "datasets" / name

    def _make_function(self) -> Transform:
        """Return the function that the stage transform applies to each row."""
        config, minimum = self._format, self._config.output.min_doc_chars
        if isinstance(config, JsonlOutputConfig):
            return config.transform or passthrough()
        if isinstance(config, ChatSftOutputConfig) and config.used_in_filter is not None:
            return RowFilter("", used_in_field=config.used_in_field, used_in=config.used_in_filter)
        return passthrough() if minimum is None else RowFilter(self.dataset.text_field, minimum)

    def _describe(self) -> dict[str, object]:
        """Return the parameters that determine the files. The weight and the options of packing are not among them."""
        dataset, config, tokenizer = self.dataset, self._config, self._config.tokenizer
        loaded = wrap_function(self._function)
        described: dict[str, object] = {
            "dataset": [dataset.path, dataset.split, dataset.subset],
            "format": type(self._format).__name__,
            "function": [str(loaded.call), loaded.code],
            "shards": [self._format.num_shards, str(self._format.shard_size), self._settings.held_out],
            "rows": [self._settings.rows, config.output.max_rows],
        }
        if config.sample is not None:
            described["sample"] = [str(config.sample), config.sample_seed, dataset.name]
        if isinstance(self._format, JsonlOutputConfig):
            return described | {"compression": self._format.compression}
        described["tokenizer"] = asdict(tokenizer) if tokenizer else None
        if not isinstance(self._format, ChatSftOutputConfig):
            return described | {"text_field": dataset.text_field}
        template = self._format.chat_template
        if template is not None and not _is_inline(template) and Path(template).is_file():
            template = sha256_of(Path(template))
        return described | {"chat": [template, self._format.messages_field, self._format.tools_field]}

    def forget(self) -> None:
        """Remove the receipts of the stages, so that all files are made again."""
        for record in find_records(self.directory, KINDS, depth=1):
            forget(record)

    def process(self) -> Manifest:
        """Run the stages, and return the manifest of the last one."""
        with explain_os_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        source = find_source(self.dataset, self._settings.output, self.directory, self._log)
        self.source_bytes = source.selected.bytes
        shards = self._count_shards(source)
        if isinstance(self._format, JsonlOutputConfig):
            return self._transform(source, shards)
        if isinstance(self._format, ChatSftOutputConfig):
            needs_rows = self._selects_rows
        else:
            # Pairs of whole files need no transform; without --target-files preprocess makes a pair for each file.
            needs_rows = self._selects_rows or source.selected.files < shards
        if needs_rows:
            self._transform(source, shards)
        return self._tokenize(None if needs_rows else source, shards)

    def _log(self, text: str) -> None:
        self._settings.run.reporter.log(text)

    @property
    def _selects_rows(self) -> bool:
        """Whether only some of the rows are read."""
        config = self._config
        limits = (self._settings.rows, config.output.max_rows, config.sample)
        return isinstance(self._function, RowFilter) or any(limit is not None for limit in limits)

    def _count_shards(self, source: DatasetSource) -> int:
        """Return the number of shards; with a shard size, the splits get at least one shard each."""
        if self._settings.rows is not None:
            return 1 + self._settings.held_out
        if self._format.num_shards is not None:
            return self._format.num_shards
        count = count_shards(source.selected.bytes, self._format.shard_size or 1)
        return max(count, 1 + self._settings.held_out)

    def _transform(self, source: DatasetSource, shards: int) -> Manifest:
        """Write shards of rows."""
        config, only = self._config, None
        if config.sample is not None:
            only = tuple(sample_shards(shards, self.dataset.name, config.sample, config.sample_seed))
        path, selection, from_stage = source.path, source.selected.selection, None
        is_divided = source.selected.files < shards
        if path is None and is_divided and not (self._settings.rows or config.output.max_rows):
            # Each unit that reads a part of a file would fetch the file again.
            download = Download(uri=source.uri, output=self.directory, selection=selection, source=source_options())
            self._run(download)
            path, selection, from_stage = self.directory, ALL_FILES, DOWNLOAD.name
        compression = self._format.compression if isinstance(self._format, JsonlOutputConfig) else ZSTD
        return self._run(
            TransformRecords(
                input=path or self._stream(source),
                output=default_output(self.directory, TRANSFORM),
                selection=selection,
                from_stage=from_stage,
                options=TransformOptions(
                    transform=passthrough.__name__,
                    shards=shards,
                    compression=compression,
                    on_bad_record=self._config.on_bad_record,
                ),
                function=self._function,
                only=only,
                shard_limit=None if self._settings.rows else config.output.max_rows,
                limit=self._settings.rows,
            )
        )

    def _tokenize(self, source: DatasetSource | None, shards: int) -> Manifest:
        """Write pairs of the files of the source, or of the shards of rows if there is no source."""
        assert self._config.tokenizer is not None  # noqa: S101
        tokenizer, config = self._config.tokenizer, self._format
        input: Path | Stream
        if source is None:
            input, selection, from_stage = self.directory, ALL_FILES, TRANSFORM.name
        else:
            input, selection, from_stage = source.path or self._stream(source), source.selected.selection, None
        endpoint = source_options().endpoint
        if isinstance(config, ChatSftOutputConfig):
            return self._run(
                Chat(
                    input=input,
                    output=default_output(self.directory, CHAT),
                    selection=selection,
                    from_stage=from_stage,
                    endpoint=endpoint,
                    options=ChatOptions(
                        tokenizer=tokenizer.model,
                        chat_template=self._find_template(config.chat_template),
                        messages=config.messages_field,
                        tools=config.tools_field,
                        on_bad_record=self._config.on_bad_record,
                    ),
                )
            )
        assert not isinstance(config, JsonlOutputConfig)  # noqa: S101
        return self._run(
            PrepareTexts(
                input=input,
                output=default_output(self.directory, PREPROCESS),
                selection=selection,
                from_stage=from_stage,
                endpoint=endpoint,
                requested=tokenizer,
                dtype=config.dtype,
                options=PreprocessOptions(
                    tokenizer=tokenizer.model,
                    keys=self.dataset.text_field,
                    append_eod=tokenizer.add_eos,
                    special_tokens=tokenizer.add_bos,
                    target_files=shards if source is not None else None,
                    on_bad_record=self._config.on_bad_record,
                ),
            )
        )

    def _stream(self, source: DatasetSource) -> Stream:
        return Stream(uri=source.uri, selection=source.selected.selection, source=source_options())

    def _find_template(self, template: str | None) -> str:
        """Return the option --chat-template; the text of a template becomes a file."""
        if template is None:
            return "tokenizer"
        if template in BUILTIN or not _is_inline(template):
            return template
        path = self.directory / "chat_template.jinja"
        Tree(self.directory).write_atomic(path, template.encode())
        return str(path)

    def _run(self, stage: Stage) -> Manifest:
        self.summaries.append(run_stage_of_program(stage, self._settings.run))
        manifest = self.summaries[-1].completion.manifest
        assert manifest is not None  # noqa: S101 - a single worker finishes all units, or raises an error
        return manifest

    def list_shards(self, manifest: Manifest) -> list[OutputShard]:
        """Return the parts of the result of JSONL or pairs that have records."""
        root = self._last_output
        if isinstance(self._format, JsonlOutputConfig):
            suffix = ".jsonl.zst" if self._format.compression == ZSTD else ".jsonl"
            return [
                OutputShard({suffix: root / entry.path}, 0, entry.records or 0)
                for entry in manifest.files
                if entry.role is None and entry.records
            ]
        return [
            OutputShard(
                {suffix: root / f"{entry.prefix}{suffix}" for suffix in (".bin", ".idx")}, entry.tokens, entry.documents
            )
            for entry in manifest.files
            if entry.role == "bin" and entry.tokens
        ]

    @property
    def _last_output(self) -> Path:
        if isinstance(self._format, JsonlOutputConfig):
            return default_output(self.directory, TRANSFORM)
        return default_output(self.directory, CHAT if isinstance(self._format, ChatSftOutputConfig) else PREPROCESS)

    @property
    def pairs(self) -> Path:
        """The directory of the pairs, for the stage pack."""
        return self._last_output


def forget(record: StageRecord) -> None:
    """Remove the receipts of a stage, so that its units run again."""
    record.tree.unlink(record.manifest_path)
    record.tree.remove_tree(record.directory / "receipts")


def run_stage_of_program(stage: Stage, run: StageRun) -> Summary:
    """Run a stage in a Python program, whose child processes must not run the program again."""
    with _hide_main_module():
        return run_stage(stage, run)


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Replace the main module for a moment: child processes import it, and so would run a script without a guard.

    A function of the main module cannot be sent to a child process then, so the stage transform runs it in this one.
    """
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _is_inline(template: str) -> bool:
    """Return whether a text is a template and not the name of one or the path of a file."""
    return "{{" in template or "{%" in template
