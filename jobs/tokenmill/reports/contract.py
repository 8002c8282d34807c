"""The records of a report. `page` and `text` render only these, and --json prints them."""

from typing import Literal

from msgspec import Struct, field

from tokenmill.core.json_lines import JsonEvent
from tokenmill.reports.compare.plots import PlotRun
from tokenmill.reports.compare.report import Axis, RunSummary


class DocumentSample(Struct, frozen=True):
    """The documents that a number was counted on; without a seed, all documents."""

    documents: int
    of_documents: int
    tokens: int
    of_tokens: int
    seed: int | None = None

    @property
    def text(self) -> str:
        """Return the sample as part of a sentence."""
        if self.seed is None:
            return f"all {self.of_documents:,} documents"
        return f"a sample of {self.documents:,} of {self.of_documents:,} documents (seed {self.seed})"


class TokenizerSummary(Struct, frozen=True):
    """A tokenizer."""

    reference: str
    vocab_size: int
    eod_token: str | None = None
    eod_id: int | None = None


class KeyTotals(Struct, frozen=True):
    """The totals of the pairs of one key."""

    key: str
    pairs: int
    documents: int
    sequences: int
    tokens: int
    bytes: int
    """Bytes of the .bin files."""


class DatasetTotals(Struct, frozen=True, kw_only=True):
    """The size of a dataset."""

    documents: int
    sequences: int
    tokens: int
    """All ids, with the EOD of each document."""
    empty_documents: int
    """Documents without any id except the EOD."""
    trained_tokens: int | None
    bytes: int
    """Bytes of all files of the output."""
    input_bytes: int
    dtypes: list[str]


class PackTotals(Struct, frozen=True):
    """The size of an output of pack."""

    shards: int
    rows: int
    sequences: int
    tokens: int
    pack_size: int
    format: str
    fill: float | None
    """Share of the rows' tokens that are not padding."""


class LengthPercentile(Struct, frozen=True):
    """The smallest length that at least `percent` of the documents do not exceed (nearest rank)."""

    percent: float
    tokens: int


class LengthRange(Struct, frozen=True):
    """Documents with `first` to `last` tokens."""

    first: int
    last: int
    documents: int
    tokens: int


class LengthSummary(Struct, frozen=True, kw_only=True):
    """The lengths of all documents in tokens, with the EOD."""

    shortest: int
    longest: int
    mean: float
    percentiles: list[LengthPercentile]
    histogram: list[LengthRange]
    seq_length: int
    longer_documents: int
    """Documents with more than `seq_length` tokens."""
    longer_tokens: int
    """All tokens of these documents."""
    tokens_beyond: int
    """The tokens of these documents after the first `seq_length` tokens."""


class SourceShare(Struct, frozen=True):
    """The documents of one source file; `share` is the share of all tokens."""

    name: str
    documents: int
    tokens: int
    share: float


class SourceSummary(Struct, frozen=True):
    """The largest source files, largest first, and the sum of all others; the same for their directories."""

    sources: int
    listed: list[SourceShare]
    others: SourceShare | None
    directories: list[SourceShare]
    """Empty if all sources are in one directory."""


class TokenFrequency(Struct, frozen=True):
    """A token id; `piece` is its text in the vocabulary, None without a tokenizer."""

    id: int
    count: int
    share: float
    piece: str | None


class IdRange(Struct, frozen=True):
    """The ids from `first` to `last`."""

    first: int
    last: int


class IdUsage(Struct, frozen=True, kw_only=True):
    """How often the ids occur."""

    sample: DocumentSample
    vocabulary: int
    """Number of ids, from 0."""
    used: int
    never_used: int
    frequent: list[TokenFrequency]
    never_used_ranges: list[IdRange]
    """The first ranges only."""


class DuplicateGroup(Struct, frozen=True):
    """Documents with the same ids: their number, the length of one of them, and the number of the first."""

    copies: int
    tokens: int
    document: int


class DuplicateSummary(Struct, frozen=True, kw_only=True):
    """Documents whose ids are equal to those of an earlier document, by a hash of the ids."""

    sample: DocumentSample
    distinct: int
    duplicates: int
    """Documents except the first of each group."""
    duplicate_tokens: int
    groups: list[DuplicateGroup]
    """The groups with the most copies."""


class ScriptUsage(Struct, frozen=True):
    """The documents most of whose letters belong to one script."""

    script: str
    documents: int
    characters: int
    bytes: int
    """Bytes of their text as UTF-8."""
    tokens: int
    """Ids without the EOD."""

    @property
    def tokens_per_character(self) -> float | None:
        """Return the tokens of a character."""
        return self.tokens / self.characters if self.characters else None

    @property
    def bytes_per_token(self) -> float | None:
        """Return the bytes of a token."""
        return self.bytes / self.tokens if self.tokens else None


class ScriptSummary(Struct, frozen=True):
    """Tokens and characters by script; `cut` documents count only with their first ids."""

    sample: DocumentSample
    cut: int
    scripts: list[ScriptUsage]


class ComparedScript(Struct, frozen=True):
    """The texts of one script, encoded by two tokenizers without additions to the text."""

    script: str
    documents: int
    characters: int
    first_tokens: int
    second_tokens: int


class ComparedTokenizers(Struct, frozen=True):
    """Two tokenizers on the same texts; the first one is that of the dataset."""

    sample: DocumentSample
    first: TokenizerSummary
    second: TokenizerSummary
    scripts: list[ComparedScript]


class RejectionReason(Struct, frozen=True):
    """Rejected records with one reason, in which numbers and quoted parts of records are left out."""

    stage: str
    reason: str
    records: int


class DataExample(Struct, frozen=True):
    """A text of the data, on request."""

    kind: Literal["rejected", "repeated", "longest"]
    title: str
    text: str


class StageTiming(Struct, frozen=True, kw_only=True):
    """A stage: its progress, its counts, and its time from the receipts of its units."""

    stage: str
    output: str
    state: str
    units: int
    units_done: int
    failures: int
    records: int
    """Records that were read."""
    written: int
    rejected: int
    dropped: int
    tokens: int | None
    input_bytes: int
    output_bytes: int
    started: str | None
    finished: str | None
    elapsed_seconds: float
    """From the first start of a unit to the last end."""
    busy_seconds: float
    """The part of this time in which a unit was in progress: without the pauses between commands."""
    unit_seconds: float
    """The sum of all units."""
    units_at_once: int
    machines: int
    bytes_per_second: float | None
    """Input bytes by the busy seconds."""
    records_per_second: float | None
    tokens_per_second: float | None


class LineageStep(Struct, frozen=True):
    """A step of the lineage, from the report's output back to the source of the text."""

    stage: str
    place: str
    """The output of a stage, or the address of the source."""
    content: str
    """The hash that identifies the content: of a manifest, of a listing, or a commit."""


class DatasetReport(JsonEvent, frozen=True, kw_only=True, tag="result"):
    """The report about an output. A part is None if the output does not have it; the notes explain why."""

    kind: Literal["dataset"] = "dataset"
    output: str
    stage: str
    state: str
    source: str
    tokenizer: TokenizerSummary | None = None
    totals: DatasetTotals | None = None
    pack: PackTotals | None = None
    keys: list[KeyTotals] = field(default_factory=list)
    sources: SourceSummary | None = None
    lengths: LengthSummary | None = None
    scripts: ScriptSummary | None = None
    compared: ComparedTokenizers | None = None
    usage: IdUsage | None = None
    duplicates: DuplicateSummary | None = None
    rejected: list[RejectionReason] = field(default_factory=list)
    stages: list[StageTiming] = field(default_factory=list)
    lineage: list[LineageStep] = field(default_factory=list)
    examples: list[DataExample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    html: str | None = None
    """The HTML file with the report."""


class RunAttempt(Struct, frozen=True):
    """An attempt of a training run."""

    started: str
    start_iteration: int
    saved: int | None
    """The iteration of its last checkpoint."""
    iterated: bool
    end: str
    """Why it ended; empty if it left no record."""


class SavedCheckpoint(Struct, frozen=True):
    """A checkpoint of a training run."""

    name: str
    iteration: int
    bytes: int
    saved: str | None
    state: str
    is_tracked: bool
    """Whether the tracker names it."""


class StalledStep(Struct, frozen=True):
    """A step that took more than three times the median."""

    step: int
    seconds: float


class RunReport(JsonEvent, frozen=True, kw_only=True, tag="result"):
    """The report about a training run."""

    kind: Literal["run"] = "run"
    path: str
    verdict: str
    axis: Axis | None
    summary: RunSummary | None
    plots: PlotRun | None
    stalled: list[StalledStep]
    """The longest stalls."""
    attempts: list[RunAttempt]
    checkpoints: list[SavedCheckpoint]
    notes: list[str]
    html: str | None = None
    """The HTML file with the report."""


Report = DatasetReport | RunReport
