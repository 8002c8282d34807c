"""The datasets of a run in Megatron-LM's form: flags, blend file, and the directory of the sample index.

tokenmill always writes a weight per pair, in proportion to the tokens within a dataset. Without weights Megatron-LM
reads a list of datasets only once (`BlendedMegatronDatasetBuilder`, case c), and a run of several epochs ends with
StopIteration after the first epoch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.publish import write_atomic
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.train import settings as s
from tokenmill.train.arguments import DataArguments

OBJECT_STORAGE_FLAG = "--object-storage-cache-path"
"""The flag of Megatron-LM's own reader of buckets: the directory of its copies of the `.idx` files."""
MAP_FLAG = "--no-mmap-bin-files"
"""The flag that it needs, too."""

INDEX_DIRECTORY = Path(".tokenmill") / "index"
"""Directory of the sample indices, below the checkpoints: the volume of the data may be read-only or shared."""


def write_data_arguments(data: TrainingData, settings: s.Settings, directory: Path) -> DataArguments:
    """Return the data arguments of a run, and write their blend file, if any, to `directory`.

    The file's name contains the hash of its content. A single pair becomes --data-path. Several pairs become a file of
    weights and paths for --data-args-path, which Megatron-LM splits at white space. One list per split becomes a JSON
    file with three keys, each with a flat list or null (megatron/training/utils/common_utils.py,
    `get_blend_and_blend_per_split`).
    """
    flags, name, content = render_blend(data, addresses=reads_buckets_itself(settings))
    if content is not None:
        path = directory / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)
        flags = [*flags, str(path)]
    if data.split is not None:
        flags = [*flags, "--split", data.split]
    return DataArguments(flags=flags, tokenizer=data.tokenizer, cache=cache_path(data, settings))


def reads_buckets_itself(settings: s.Settings) -> bool:
    """Return whether the flags of a run let Megatron-LM read its pairs in buckets, instead of copies of them."""
    return OBJECT_STORAGE_FLAG in (argument.partition("=")[0] for argument in settings.extra_args)


def render_blend(
    data: TrainingData, *, file: bool = False, addresses: bool = False
) -> tuple[list[str], str, bytes | None]:
    """Return the flag for the datasets, and the name and the content of the flag's file.

    A single pair is part of the command line, and the content is None, unless `file` requests a file. Pairs in buckets
    have the paths of their copies, or their addresses.
    """
    show = show_addresses if addresses else str
    prefixes = [show(pair.prefix) for source in data.sources for pair in source.pairs]
    single_pair = len(prefixes) == 1 and not file
    _check_paths(prefixes, in_text_file=data.split is not None and not single_pair)
    if data.split is None:
        lists = {key: _flatten(data.lists.get(name, []), show) or None for key, name in FILE_NAMES.items()}
        content = readable_json(lists)
        return ["--per-split-data-args-path"], f"blend-{content_id(lists)}.json", content
    flat = _flatten(data.lists["all"], show)
    if single_pair:
        return ["--data-path", flat[1]], "", None
    content = "".join(f"{weight} {prefix}\n" for weight, prefix in zip(flat[::2], flat[1::2], strict=True)).encode()
    return ["--data-args-path"], f"blend-{content_id(flat)}.txt", content


def cache_path(data: TrainingData, settings: s.Settings) -> Path:
    """Return the directory of Megatron-LM's sample index, which is named by the hash of the data's content.

    Megatron-LM finds an index by the path of the data, not by their content. The hash in the directory's name prevents
    it from using the index of older data. By default the directory is below the checkpoints, because every node can
    write there, while the data may be mounted read-only; `dataset.cachePath` specifies another place.
    """
    base = settings.dataset.cache_path or settings.checkpoint.node_directory / INDEX_DIRECTORY
    return Path(base) / data.hash


def _check_paths(prefixes: Sequence[str], *, in_text_file: bool) -> None:
    """Raise RequestError for a path that Megatron-LM would split: in a text file at white space, else at its ends."""
    for prefix in prefixes:
        if prefix != prefix.strip() or (in_text_file and len(prefix.split()) > 1):
            raise RequestError(
                f"{prefix!r} contains white space, at which Megatron-LM splits paths; rename the directory, or use a "
                "symbolic link without white space"
            )


def _flatten(sources: Sequence[WeightedDataset], show: Callable[[str], str]) -> list[str]:
    """Return alternating weights and paths, the only form of a weighted list that Megatron-LM reads."""
    return [
        item
        for source in sources
        for weight, pair in source.weighted_pairs()
        for item in (repr(weight), show(pair.prefix))
    ]
