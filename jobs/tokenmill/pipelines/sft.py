"""The pipeline of `tokenmill sft`: chat for each dataset, then pack for all of them, on one machine.

    <output>/source            the files of a source, with `--download` only
    <output>/chat              pairs of ids and masks; with several datasets, a directory for each of them below it
    <output>/packed            packed rows

Each stage skips its finished units, so that the same call continues after an interruption. Another pack size runs only
the stage pack.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.files.paths import safe_name
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.pipelines.pipeline import StageResult, run_stages
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.stage import Chat
from tokenmill.stages.download import Download
from tokenmill.stages.pack.blend import ALL, BlendedDataset, make_blend
from tokenmill.stages.pack.options import DROP, PackOptions, RowOptions
from tokenmill.stages.pack.stage import Pack
from tokenmill.stages.registry import CHAT, DOWNLOAD, PACK
from tokenmill.tokenize.stream import Stream

SOURCE_FOLDER, CHAT_FOLDER, PACKED_FOLDER = "source", "chat", "packed"


class SftDataset(NamedTuple):
    """A dataset of conversations: a directory or a stream, and its weight in the blend.

    The selection applies to a directory; a stream has its own.
    """

    name: str
    input: Path | Stream
    selection: Selection = Selection()
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FineTuningData:
    """The datasets of each list of a blend, the output, and the options of both stages.

    The only list of a blend without splits has the name `stages.pack.blend.ALL`. `format` is the format of the packed
    files. With `download`, the files of a source are kept.
    """

    lists: Mapping[str, Sequence[SftDataset]]
    output: Path
    chat: ChatOptions
    rows: RowOptions
    format: str
    endpoint: str | None = None
    download: bool = False

    @property
    def packed(self) -> Path:
        """The directory of the packed rows."""
        return self.output / PACKED_FOLDER

    @property
    def stages(self) -> list[str]:
        """The names of the stages, in their order."""
        datasets = [dataset for datasets in self.lists.values() for dataset in datasets]
        names = (
            [DOWNLOAD.name] if self.download and any(isinstance(dataset.input, Stream) for dataset in datasets) else []
        )
        return [*names, CHAT.name, PACK.name]

    def run(self, run: StageRun, end: Callable[[StageResult], None], only: str | None = None) -> list[StageResult]:
        """Run the stages in order, or only one of them, and call `end` after each; finished units are skipped.

        Sequences that are longer than a packed row are left out and counted, unless `--max-length` limits them before.

        Raises:
            RequestError: an input is invalid.
        """
        stages = self.list_stages(download=self.download)
        return run_stages([item for item in stages if only in (None, item[1].kind.name)], run, end)

    def list_stages(self, *, download: bool) -> list[tuple[str, Stage]]:
        """Return the stages with their labels, in order; `download` keeps the files of sources."""
        stages: list[tuple[str, Stage]] = []
        blended: dict[str, list[BlendedDataset]] = {}
        for (list_name, dataset), folder in self._name_folders():
            label = f" {folder}" if folder else ""
            fetch, fetched = self._fetch(dataset, folder) if download else (None, dataset)
            if fetch:
                stages.append((f"{DOWNLOAD.name}{label}", fetch))
            chat = Chat(
                input=fetched.input,
                output=self.output / CHAT_FOLDER / folder,
                options=self.chat,
                selection=fetched.selection,
                endpoint=self.endpoint,
            )
            stages.append((f"{CHAT.name}{label}", chat))
            blended.setdefault(list_name, []).append(BlendedDataset(dataset.name, chat.output, dataset.weight))
        options = PackOptions(**vars(self.rows), format=self.format, over_long=DROP)
        pack = Pack(input=make_blend(blended, "the blend"), output=self.packed, options=options)
        return [*stages, (PACK.name, pack)]

    def _name_folders(self) -> list[tuple[tuple[str, SftDataset], str]]:
        """Return each dataset with its list and the name of its directory; a single dataset has no name."""
        datasets = [(list_name, dataset) for list_name, items in self.lists.items() for dataset in items]
        if len(datasets) == 1:
            return [(datasets[0], "")]
        return [
            ((list_name, dataset), safe_name(dataset.name if list_name == ALL else f"{list_name}-{dataset.name}"))
            for list_name, dataset in datasets
        ]

    def _fetch(self, dataset: SftDataset, folder: str) -> tuple[Download | None, SftDataset]:
        """Return the download of a stream, and the dataset that reads its files."""
        if isinstance(dataset.input, Path):
            return None, dataset
        stream, output = dataset.input, self.output / SOURCE_FOLDER / folder
        download = Download(
            uri=stream.uri,
            output=output,
            selection=stream.selection,
            source=stream.source,
            format=self.chat.format,
        )
        return download, dataset._replace(input=output, selection=Selection(split="any"))
