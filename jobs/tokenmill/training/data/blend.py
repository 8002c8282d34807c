"""What a run reads: finished outputs of preprocess, weighted, as Megatron-LM is told of them.

Stands between preprocess, whose manifests it reads, and `arguments`, which takes its words. What Megatron-LM
would meet hours later, or never say, is refused here: a part of the split without documents makes
`GPTDataset` count epochs without end (megatron/core/datasets/gpt_dataset.py, `_get_num_epochs`).

Weights are always written, one for each pair, by tokens within a dataset. Without weights Megatron-LM reads a
list of datasets once and no further (`BlendedMegatronDatasetBuilder`, case c): a run of several epochs ends in
StopIteration where the first does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import RequestError
from tokenmill.files.codec import content_id, readable_json
from tokenmill.files.publish import write_atomic
from tokenmill.training import settings as s
from tokenmill.training.arguments import Data
from tokenmill.training.data.datasets import Pair, TrainingData, WeightedDataset
from tokenmill.training.data.samples import check_draws
from tokenmill.training.data.split import SPLITS, Names, cuts, fractions

if TYPE_CHECKING:
    from tokenmill.tokens.dataset import Dataset

MOST_PAIRS = 32_766
"""Pairs in one list: Megatron-LM numbers them in int16 and asserts fewer than 32,767 (blended_dataset.py)."""

PER_DATASET = "--per-dataset-sequences-path"

MANY_EPOCHS = 4
"""Reading text again up to so often is nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""

INDEX = Path(".tokenmill") / "index"
"""Below the checkpoints' directory: sample indices. The data's own volume may be read-only or shared."""


def resolve(settings: s.Settings, root: Path | None = None) -> TrainingData:
    """Find what (derived) settings name, relative paths below `root`, and hold it to what the run needs.

    Raises RequestError where anything is missing, unfinished, damaged, or cannot be trained on so.
    """
    corpus = gather(settings.dataset, root)
    training = settings.training
    if training.eval_iterations and not _has(corpus, "validation"):
        raise RequestError(
            f"training.evalIterations is {training.eval_iterations} and there is nothing to validate on: "
            + (f"dataset.split is {corpus.split}" if corpus.split else "dataset.blend.validation is empty")
            + "; hold some out, or set training.evalIterations to 0"
        )
    highest = max(corpus.vocab_size - 1, corpus.max_token_id)
    layout = settings.layout(corpus.vocab_size)
    if highest >= layout.padded_vocab:
        raise RequestError(
            f"the tokenizer of {corpus.tokenizer.parent} has token ids up to {highest}, and the embedding has "
            f"{layout.padded_vocab} rows: {corpus.vocab_size} entries padded to a multiple of "
            f"{layout.vocab_divisible_by} x tensor parallel {layout.tensor}; an id outside it ends training in a "
            "CUDA error: make the data again with a tokenizer without gaps in its ids"
        )
    resets = {
        "training.resetPositionIds": training.reset_position_ids,
        "training.resetAttentionMask": training.reset_attention_mask,
        "training.eodMaskLoss": training.eod_mask_loss,
    }
    if any(resets.values()) and corpus.eod_token != corpus.eos_token:
        names = ", ".join(name for name, wanted in resets.items() if wanted)
        raise RequestError(
            f"{names}: Megatron-LM takes the tokenizer's eos ({corpus.eos_token}) for a document's end, and documents "
            f"in {corpus.tokenizer.parent} end with {corpus.eod_token or 'nothing'}; turn it off, or make the data "
            "again with a tokenizer whose eos is the EOD"
        )
    # Then Megatron-LM reads no .idx header, and takes this dtype (GPTDatasetConfig.token_dtype_code).
    assumed = "int32" if corpus.vocab_size > 2**16 else "uint16"
    if PER_DATASET in (word.partition("=")[0] for word in settings.extra_args) and corpus.dtype != assumed:
        raise RequestError(
            f"extraArgs has {PER_DATASET}, with which Megatron-LM takes ids for {assumed}, since the vocabulary has "
            f"{corpus.vocab_size:,} entries, and the pairs have {corpus.dtype}: it would read other ids; leave it out"
        )
    _check_epochs(corpus, settings)
    check_draws(corpus, settings)
    return corpus


def gather(dataset: s.DatasetSettings, root: Path | None, names: Names | None = None) -> TrainingData:
    """Find the datasets and give each its share; hold them to what any run on them needs."""
    names = names or Names()
    blend = dataset.blend
    if (dataset.path is None) == (blend is None):
        raise RequestError("give dataset.path (an output of tokenmill preprocess), or dataset.blend: one of the two")
    if blend is None:
        assert dataset.path is not None  # noqa: S101
        lists = {"all": [s.BlendPart(path=dataset.path)]}
        by = "tokens"
    else:
        lists = {name: getattr(blend, name) for name in ("all", *SPLITS) if getattr(blend, name)}
        by = blend.by
        if "all" in lists and len(lists) > 1:
            raise RequestError(
                f"dataset.blend has all beside {', '.join(sorted(lists.keys() - {'all'}))}: a list to be cut by "
                "dataset.split, or a list for each split; not both"
            )
        if not lists.keys() & {"all", "train"}:
            raise RequestError("dataset.blend has nothing to train on: fill its all, or its train")
    found: dict[str, list[WeightedDataset]] = {}
    opened: list[tuple[str, Dataset]] = []
    for name, parts in lists.items():
        found[name] = []
        for number, part in enumerate(parts):
            label = "dataset.path" if blend is None else names.part(name, number)
            data, source = _find(label, part.path, root, dataset.key, names)
            opened.append((label, data))
            found[name].append(source)
    _same_tokenizer(opened)
    notes = _apart(found)
    shared = {name: _shares(sources, lists[name], by) for name, sources in found.items()}
    for name, sources in shared.items():
        count = sum(len(source.pairs) for source in sources)
        if count > MOST_PAIRS:
            raise RequestError(
                f"{names.part(name) if blend else 'dataset.path'} has {count:,} pairs, and Megatron-LM takes at most "
                f"{MOST_PAIRS:,}: make fewer, larger ones with tokenmill preprocess --target-files"
            )
    split = None
    if "all" in shared:
        split = ",".join(word.strip() for word in dataset.split.split(","))
        _check_split(split, shared["all"], names)
    _, first = opened[0]
    about, basis = first.tokenizer, first.basis
    empty = sum(source.empty for sources in shared.values() for source in sources)
    dtypes = {pair.dtype for sources in shared.values() for source in sources for pair in source.pairs}
    if empty:
        notes.append(f"left out {empty} pairs without tokens")
    return TrainingData(
        lists=shared,
        split=split,
        tokenizer=first.record.output / "tokenizer",
        vocab_size=about.vocab_size,
        max_token_id=about.max_token_id,
        dtype=", ".join(sorted(dtypes)),
        eod=basis.eod,
        eod_token=about.eod_token if basis.eod is not None else None,
        eos_token=about.eos_token,
        fingerprint=basis.tokenizer,
        reference=about.reference,
        notes=notes,
    )


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


def summary(corpus: TrainingData, settings: s.Settings) -> list[str]:
    """Say what a run reads and how often; lines that begin with "warning:" are for somebody to decide on."""
    training = settings.training
    batch, length = training.global_batch_size or 0, settings.model.seq_length
    total = training.iterations * batch * length
    lines = [
        f"{training.iterations:,} iterations of {batch:,} sequences of {length:,} tokens: {batch * length:,} tokens a "
        f"step, {total:,} in all",
        f"tokenizer {corpus.tokenizer}: {corpus.vocab_size:,} entries, ids as {corpus.dtype}, documents end with "
        f"{corpus.eod_token or 'no EOD'}",
        *corpus.notes,
    ]
    for source in corpus.train:
        epochs = epochs_of(source, corpus.split, total)
        lines.append(
            f"{source.path}: {source.tokens:,} tokens in {source.documents:,} documents, {len(source.pairs):,} pairs; "
            f"{source.share:.2%} of the samples, {epochs:.2f} epochs"
        )
        if epochs > MANY_EPOCHS:
            lines.append(
                f"warning: {source.path} is read {epochs:.1f} times; above about {MANY_EPOCHS} epochs repeated text "
                "adds little: train for fewer iterations, or give it a smaller weight"
            )
    for name in SPLITS[1:]:
        if _has(corpus, name):
            held = corpus.lists.get("all") or corpus.lists[name]
            lines.append(f"{name}: {sum(sequences_of(source, corpus.split, name) for source in held):,} sequences")
    return lines


def epochs_of(source: WeightedDataset, split: str | None, total: int) -> float:
    """Return how often a run of so many tokens reads what of a source goes to training."""
    return total * source.share / trained_on(source, split)


def trained_on(source: WeightedDataset, split: str | None) -> float:
    """Return the tokens of a source that go to training, were its sequences all of one length."""
    return source.tokens * sequences_of(source, split, "train") / source.sequences


def _check_epochs(corpus: TrainingData, settings: s.Settings) -> None:
    """Refuse a run that would read a dataset so often that one of its numbers must be wrong."""
    training, length = settings.training, settings.model.seq_length
    batch = training.global_batch_size or 0
    total = training.iterations * batch * length
    for source in corpus.train:
        epochs, tokens = epochs_of(source, corpus.split, total), trained_on(source, corpus.split)
        if epochs > training.max_epochs:
            raise RequestError(
                f"{source.label} {source.path} would be read {epochs:,.1f} times, and training.maxEpochs is "
                f"{training.max_epochs:,g}: {training.iterations:,} iterations x {batch:,} sequences x {length:,} "
                f"tokens = {total:,} tokens, {source.share:.2%} of them from {tokens:,.0f} tokens of its training "
                "split; train for fewer iterations, bring more data, or give it a smaller weight; if it is meant, set "
                f"training.maxEpochs to {math.ceil(epochs)} or more"
            )


def sequences_of(source: WeightedDataset, split: str | None, part: str) -> int:
    """Count the sequences of a source that fall into a part of the split; without a split, all of them."""
    if split is None:
        return source.sequences
    number = SPLITS.index(part)
    return sum(cut[1] - cut[0] for pair in source.pairs if (cut := cuts(split, pair.sequences)[number]))


def _find(
    label: str, named: str, root: Path | None, key: str | None, names: Names
) -> "tuple[Dataset, WeightedDataset]":
    """Open what a setting names: a dataset's directory, or the path of one of its pairs, with or without suffix."""
    from tokenmill.tokens.dataset import check_tokenizer, find_dataset, open_dataset, record_of_pair

    path = ((root or Path()) / named).absolute()
    prefix = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
    pair = None if path.is_dir() else record_of_pair(prefix)
    alone = pair is not None
    try:
        data = open_dataset(pair[0]) if pair else find_dataset(path)
    except RequestError as problem:
        raise RequestError(f"{label} {named}: {problem}") from problem
    keys = data.basis.keys
    if pair:
        pairs = [entry for entry in data.pairs if entry.prefix == pair[1]]
        empty = []
        if not pairs:
            raise RequestError(f"{label} {named}: {pair[0].output} has no pair {pair[1]} with tokens")
    else:
        if key is None and len(keys) > 1:
            raise RequestError(
                f"{label} {named} has the keys {', '.join(keys)}: say which to train on with {names.key}"
            )
        if key is not None and key not in keys:
            raise RequestError(f"{label} {named} has no key {key} ({names.key}); it has {', '.join(keys)}")
        pairs = [entry for entry in data.pairs if entry.key == (key or keys[0])]
        empty = [each for each in data.manifest.empty if each.key == (key or keys[0])]
        if not pairs:
            raise RequestError(
                f"{label} {named} has no tokens under the key {key or keys[0]}: choose another {names.key}"
            )
    hashes = {entry.path: entry.xxh3_128 for entry in data.manifest.files}
    wrong = check_tokenizer(data.record, data.plan)
    if wrong:
        raise RequestError(f"{label} {named}: {wrong[0]}")
    return data, WeightedDataset(
        label=label,
        path=named,
        manifest=data.manifest.hash,
        pairs=tuple(
            Pair(
                str(data.record.output / entry.prefix),
                entry.documents,
                entry.sequences,
                entry.tokens,
                entry.bytes,
                data.dtype(entry),
                hashes[f"{entry.prefix}.bin"] + hashes[f"{entry.prefix}.idx"],
            )
            for entry in pairs
        ),
        empty=len(empty),
        alone=alone,
    )


def _same_tokenizer(opened: "Sequence[tuple[str, Dataset]]") -> None:
    """Refuse a blend whose ids mean different things, or whose documents end differently."""
    label, first = opened[0]
    for other, data in opened[1:]:
        if data.basis.tokenizer != first.basis.tokenizer:
            raise RequestError(
                f"{label} {first.record.output} was made with the tokenizer {first.tokenizer.reference} "
                f"({first.basis.tokenizer[:12]}), {other} {data.record.output} with "
                f"{data.tokenizer.reference} ({data.basis.tokenizer[:12]}): the same ids are different "
                "text; make one of them again with the other's tokenizer"
            )
        if data.basis.eod != first.basis.eod:
            raise RequestError(
                f"documents end with token {first.basis.eod} in {label} {first.record.output}, with "
                f"{data.basis.eod} in {other} {data.record.output}; make one of them again with the other's "
                "--eod-token"
            )


def _apart(lists: dict[str, list[WeightedDataset]]) -> list[str]:
    """Keep what is validated on out of training: pairs named alone are taken out of datasets named whole.

    A pair that is in two lists otherwise, or twice in one, is refused. Changes `lists`; returns what to say.
    """
    alone = {
        pair.prefix: (name, source.label)
        for name, sources in lists.items()
        for source in sources
        if source.alone
        for pair in source.pairs
    }
    notes, seen = [], dict[str, str]()
    for name, sources in lists.items():
        for number, source in enumerate(sources):
            kept = [pair for pair in source.pairs if source.alone or alone.get(pair.prefix, (name,))[0] == name]
            if len(kept) < len(source.pairs):
                notes.append(f"left {len(source.pairs) - len(kept)} pairs of {source.path} to the other splits")
                if not kept:
                    raise RequestError(f"{source.label} {source.path}: all of its pairs are in other splits")
                sources[number] = replace(source, pairs=tuple(kept))
            for pair in kept:
                other = seen.setdefault(pair.prefix, source.label)
                if other != source.label:
                    raise RequestError(
                        f"{pair.prefix} is in {other} and in {source.label}: name it in one of them; a dataset is read "
                        "more often by its weight"
                    )
    return notes


def _shares(sources: list[WeightedDataset], parts: Sequence[s.BlendPart], by: str) -> list[WeightedDataset]:
    """Give each source its share: by weight where weights are given, else by tokens, documents or bytes."""
    given = [part.weight for part in parts]
    if by == "given" or any(weight is not None for weight in given):
        for source, weight in zip(sources, given, strict=True):
            if weight is None:
                raise RequestError(f"{source.label} {source.path} has no weight: give each of them one")
            if not 0 < weight < math.inf:
                raise RequestError(f"{source.label} {source.path} has the weight {weight}: it must be above 0")
        sizes = [float(weight) for weight in given if weight is not None]
    else:
        sizes = [float(getattr(source, by)) for source in sources]
    shared = [replace(source, share=size / sum(sizes)) for source, size in zip(sources, sizes, strict=True)]
    for source in shared:
        if not source.share:
            raise RequestError(
                f"{source.label} {source.path} has so small a weight beside the others' that none is left"
            )
    return shared


def _check_split(split: str, sources: list[WeightedDataset], names: Names) -> None:
    """Refuse a split that leaves a part of some pair empty: on that Megatron-LM counts epochs without end."""
    fractions(split, names)
    counts = sorted({pair.sequences for source in sources for pair in source.pairs})
    for count in counts:
        empty = [name for name, cut in zip(SPLITS, cuts(split, count), strict=True) if cut and cut[0] >= cut[1]]
        if not empty:
            continue
        pair = next(pair for source in sources for pair in source.pairs if pair.sequences == count)
        pairs = sum(len(source.pairs) for source in sources)
        raise RequestError(
            f"{names.split} {split} gives {' and '.join(empty)} none of the {count} documents of {pair.prefix} (the "
            f"smallest of {pairs} pairs; each is cut), on which Megatron-LM would never come to a start; "
            + _remedy(split, counts, names)
        )


def _remedy(split: str, counts: Sequence[int], names: Names) -> str:
    shares = fractions(split)
    for other in ("98,1,1", "95,4,1", "90,8,2", "80,15,5", "80,10,10", "60,20,20"):
        words = ",".join(word if share else "0" for word, share in zip(other.split(","), shares, strict=True))
        if all(cut is None or cut[0] < cut[1] for count in counts for cut in cuts(words, count)):
            return f"{words} would do, or fewer, larger pairs (tokenmill preprocess --target-files)"
    return (
        "make fewer, larger pairs (tokenmill preprocess --target-files), or name pairs to hold out in "
        f"{names.part('validation')}, or set {names.split} to 1,0,0 with training.evalIterations 0"
    )


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


def _has(corpus: TrainingData, part: str) -> bool:
    if corpus.split is None:
        return bool(corpus.lists.get(part))
    return fractions(corpus.split)[SPLITS.index(part)] > 0
