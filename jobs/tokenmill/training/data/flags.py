"""The datasets of a run as Megatron-LM reads them: flags, the file that a flag names, and the sample index's directory.

Weights are always written, one for each pair, by tokens within a dataset. Without weights Megatron-LM reads a
list of datasets once and no further (`BlendedMegatronDatasetBuilder`, case c): a run of several epochs ends in
StopIteration where the first does.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.files.codec import content_id, readable_json
from tokenmill.files.publish import write_atomic
from tokenmill.training import settings as s
from tokenmill.training.arguments import Data
from tokenmill.training.data.datasets import TrainingData, WeightedDataset
from tokenmill.training.data.split import SPLITS

INDEX = Path(".tokenmill") / "index"
"""Below the checkpoints' directory: sample indices. The data's own volume may be read-only or shared."""


def data_flags(corpus: TrainingData, settings: s.Settings, directory: Path) -> Data:
    """Write what the command line cannot hold into `directory`, under a name made of its content; return the words.

    One pair is --data-path. More of them are weights and paths in a file for --data-args-path, which
    Megatron-LM cuts at white space; lists for each split are JSON with all three keys, each a flat list or
    null (megatron/training/utils/common_utils.py, `get_blend_and_blend_per_split`).
    """
    words, name, data = listing(corpus)
    if data is not None:
        path = directory / name
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)
        words = [*words, str(path)]
    if corpus.split is not None:
        words = [*words, "--split", corpus.split]
    return Data(flags=words, tokenizer=corpus.tokenizer, cache=cache_path(corpus, settings))


def listing(corpus: TrainingData, *, file: bool = False) -> tuple[list[str], str, bytes | None]:
    """Return the flag for the datasets, and the name and content of the file that it takes.

    A single pair stands on the command line, and the content is None, unless it is to be in a `file`, too.
    """
    prefixes = [pair.prefix for source in corpus.sources for pair in source.pairs]
    alone = len(prefixes) == 1 and not file
    _check_paths(prefixes, cut=corpus.split is not None and not alone)
    if corpus.split is None:
        keys = zip(("train", "valid", "test"), SPLITS, strict=True)
        lists = {key: _flat(corpus.lists.get(name, [])) or None for key, name in keys}
        data = readable_json(lists)
        return ["--per-split-data-args-path"], f"blend-{content_id(lists)}.json", data
    flat = _flat(corpus.lists["all"])
    if alone:
        return ["--data-path", flat[1]], "", None
    data = "".join(f"{weight} {prefix}\n" for weight, prefix in zip(flat[::2], flat[1::2], strict=True)).encode()
    return ["--data-args-path"], f"blend-{content_id(flat)}.txt", data


def cache_path(corpus: TrainingData, settings: s.Settings) -> Path:
    """Return the directory of Megatron-LM's sample indices, one for each content of the data.

    Megatron-LM finds an index by the data's path, not by what lies there: the manifests' hashes in the name
    keep one of older data from being taken. It lies below the checkpoints unless `dataset.cachePath` says
    otherwise: that every node reads and writes, while data may be mounted read-only.
    """
    base = settings.dataset.cache_path or Path(settings.checkpoint.path) / INDEX
    return Path(base) / corpus.hash


def _check_paths(prefixes: Sequence[str], *, cut: bool) -> None:
    """Refuse paths that Megatron-LM would cut: in a list's file at any white space, elsewhere at the ends."""
    for prefix in prefixes:
        if prefix != prefix.strip() or (cut and len(prefix.split()) > 1):
            raise RequestError(
                f"{prefix!r} has white space in it, at which Megatron-LM cuts paths; rename the directory, or name it "
                "through a link without"
            )


def _flat(sources: Sequence[WeightedDataset]) -> list[str]:
    """Return weights and paths in turn: the only form of a weighted list that Megatron-LM reads."""
    return [word for source in sources for weight, pair in source.weighted() for word in (repr(weight), pair.prefix)]
