"""The configuration with which Megatron-LM and the frameworks based on it read the same samples as `open`, themselves.

They read pairs with Megatron-Core's GPTDataset, whose samples `tokenmill.data.open` gives, too. So they need no loader:
`describe_data` turns the arguments of `open` into their arguments. Their sampler takes the samples in the order of
`tokenmill.data.Order`, and stores `consumed_samples` in their checkpoints.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.buckets.mirror import find_address, show_addresses
from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.files.user_path import local_path
from tokenmill.datasets.blend_file import WeightedSource
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.split import FILE_NAMES, SPLITS
from tokenmill.datasets.weighted import WeightedDataset, refuse_rows
from tokenmill.errors import RequestError
from tokenmill.samples.opening import DEFAULT_SPLIT, SYNTHETIC, Source, parse_source
from tokenmill.samples.pack_source import find_pack
from tokenmill.samples.pair_blend import choose_weights

SURPLUS = 0.005
"""Megatron-Core's default of mid_level_dataset_surplus."""

AUTOMODEL_CLASS = "nemo_automodel.components.datasets.llm.megatron_dataset.MegatronPretraining"


class PrefixList(NamedTuple):
    """The pairs of a list and their weights; no weights mean that each pair is read once."""

    prefixes: list[str]
    weights: list[float] | None

    def flatten(self) -> list[str]:
        """Return the list as Megatron-LM's --data-path reads it: prefixes, or weights and prefixes in turn."""
        if self.weights is None:
            return list(self.prefixes)
        return [item for pair in zip(map(repr, self.weights), self.prefixes, strict=True) for item in pair]


class MegatronData(NamedTuple):
    """The data of a run as Megatron-LM and its relatives configure them.

    Attributes:
        blends: the list of all data, named "all", or those of train, validation and test.
        split: the shares of train, validation and test; None with lists for each of them.
        seq_length: the tokens of a sample.
        samples: the number of training samples, which must be the iterations times the global batch; None: one epoch.
        seed: the seed of the permutations.
        surplus: mid_level_dataset_surplus.
        mask_eod: whether inputs that are the EOD are not trained.
        cache: the directory of the sample indices. The hash of the data's content is a part of its name, because
            Megatron-Core finds an index by the path of the data, and would use that of older data.
    """

    blends: dict[str, PrefixList]
    split: str | None
    seq_length: int
    samples: int | None
    seed: int
    surplus: float
    mask_eod: bool
    cache: str

    def flags(self, directory: Path) -> list[str]:
        """Return the arguments of Megatron-LM; a list of several pairs is written to a file in `directory`.

        The program sets the other arguments. --train-iters times --global-batch-size, or --train-samples, must be
        `samples`.
        """
        flags = ["--seq-length", str(self.seq_length), "--seed", str(self.seed), "--data-cache-path", self.cache]
        flags += ["--dataloader-type", "single"]
        if self.surplus != SURPLUS:
            flags += ["--mid-level-dataset-surplus", repr(self.surplus)]
        if self.mask_eod:
            flags.append("--eod-mask-loss")
        if self.split is None:
            lists = {
                key: self.blends[name].flatten() if name in self.blends else None for key, name in FILE_NAMES.items()
            }
            path = directory / f"blend-{content_id(lists)}.json"
            write_atomic(path, readable_json(lists))
            return [*flags, "--per-split-data-args-path", str(path)]
        flat = self.blends["all"].flatten()
        if len(self.blends["all"].prefixes) == 1:
            return [*flags, "--data-path", *flat, "--split", self.split]
        _check_white_space(self.blends["all"].prefixes)
        path = directory / f"blend-{content_id(flat)}.txt"
        width = 1 if self.blends["all"].weights is None else 2
        lines = [" ".join(flat[start : start + width]) for start in range(0, len(flat), width)]
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
        return [*flags, "--data-args-path", str(path), "--split", self.split]

    def bridge(self) -> dict[str, object]:
        """Return the arguments of Megatron-Bridge's GPTDatasetConfig; the recipe adds the tokenizer.

        train_iters times global_batch_size of the recipe must be `samples`.
        """
        return {
            "seq_length": self.seq_length,
            "random_seed": self.seed,
            **self._blend_arguments(),
            "path_to_cache": self.cache,
            "mid_level_dataset_surplus": self.surplus,
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": self.mask_eod,
            "dataloader_type": "single",
        }

    def core(self) -> dict[str, object]:
        """Return the arguments of Megatron-Core's GPTDatasetConfig; the program adds the tokenizer.

        The sizes of BlendedMegatronDatasetBuilder are `samples`, and the numbers for validation and test.
        """
        arguments = self.bridge()
        arguments["sequence_length"] = arguments.pop("seq_length")
        arguments["create_attention_mask"] = False
        del arguments["dataloader_type"]
        return arguments

    def automodel(self, part: str = "train") -> dict[str, object]:
        """Return the section `dataset` of a recipe of NeMo Automodel, as YAML has it; the recipe adds the tokenizer.

        Raises:
            RequestError: MegatronPretraining has no argument for a setting.
        """
        self._check_paths_form()
        if self.surplus != SURPLUS or self.mask_eod:
            raise RequestError(
                f"invalid surplus {self.surplus}, mask_eod {self.mask_eod}: NeMo Automodel has only {SURPLUS} and "
                "False; remove these arguments"
            )
        name = "train" if part == "train" else "val" if part == "validation" else "test"
        return {
            "_target_": AUTOMODEL_CLASS,
            **self._path_arguments(),
            "seq_length": self.seq_length,
            "seed": self.seed,
            "index_mapping_dir": self.cache,
            f"num_{name}_samples": self.samples,
            "splits_to_build": part,
        }

    def nemo(self) -> dict[str, object]:
        """Return the arguments of NeMo 2's PreTrainingDataModule (nemo_toolkit 2.x); the program adds batch sizes.

        Its trainer's max_steps times global_batch_size must be `samples`.

        Raises:
            RequestError: PreTrainingDataModule has no argument for a setting.
        """
        self._check_paths_form()
        if self.surplus != SURPLUS:
            raise RequestError(f"invalid surplus {self.surplus}: NeMo 2 has only {SURPLUS}; remove surplus")
        arguments = self._path_arguments()
        if isinstance(arguments["paths"], dict):
            arguments["paths"] = {name: arguments["paths"].get(name) for name in SPLITS}
        return {
            **arguments,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "index_mapping_dir": self.cache,
            "num_train_samples": self.samples,
            "eod_mask_loss": self.mask_eod,
        }

    def _blend_arguments(self) -> dict[str, object]:
        blends = {name: (blend.prefixes, blend.weights) for name, blend in self.blends.items()}
        if self.split is None:
            return {"blend_per_split": [blends.get(name) for name in SPLITS]}
        return {"blend": blends["all"], "split": self.split}

    def _path_arguments(self) -> dict[str, object]:
        if self.split is None:
            return {"paths": {name: blend.flatten() for name, blend in self.blends.items()}}
        return {"paths": self.blends["all"].flatten(), "split": self.split}

    def _check_paths_form(self) -> None:
        """Raise RequestError for the list that NeMo reads in another way: it ignores the weight of a single pair."""
        for blend in self.blends.values():
            if len(blend.prefixes) == 1 and blend.weights is not None and self.split is not None:
                raise RequestError(
                    f"{blend.prefixes[0]} is the only pair and has a weight, which NeMo ignores, so its number of "
                    "epochs could differ; remove the weight"
                )


def describe_data(
    source: Source,
    *,
    seq_length: int,
    cache: str | Path,
    samples: int | None = None,
    seed: int = 1234,
    split: str | None = None,
    surplus: float = SURPLUS,
    key: str | None = None,
    mask_eod: bool = False,
) -> MegatronData:
    """Return the configuration for the samples that `open` gives for these arguments.

    Args:
        source: outputs of tokenmill preprocess, or pairs, as of `tokenmill.data.open`.
        seq_length: the tokens of a sample.
        cache: a directory for Megatron-Core's sample indices, which all ranks can write to.
        samples: the number of training samples.
        seed: the seed of the permutations.
        split: the shares of train, validation and test.
        surplus: Megatron-LM's --mid-level-dataset-surplus.
        key: the key of the datasets, if their outputs have several.
        mask_eod: do not train inputs that are the EOD.

    Raises:
        RequestError: a dataset is missing, unfinished or damaged, is packed, or is synthetic.
    """
    if isinstance(source, str) and source.startswith(SYNTHETIC):
        raise RequestError(
            f"SYNTHETIC: {source} has no pairs; specify an output of tokenmill preprocess, or use --mock-data of "
            "Megatron-LM, which makes other tokens"
        )
    lists = parse_source(source)
    if "all" not in lists and split is not None:
        raise RequestError(f"invalid split {split}: the source has separate datasets for each split; remove split")
    opened = {name: _open_list(sources, key) for name, sources in lists.items() if sources}
    if not opened:
        raise RequestError("invalid source: it names no dataset; add one")
    return MegatronData(
        blends={name: _blend(datasets, samples, divided=name == "all") for name, datasets in opened.items()},
        split=(DEFAULT_SPLIT if split is None else split) if "all" in opened else None,
        seq_length=seq_length,
        samples=samples,
        seed=seed,
        surplus=surplus,
        mask_eod=mask_eod,
        cache=str(
            local_path(cache, "cache")
            / content_id({name: [entry.content for entry in datasets] for name, datasets in opened.items()})
        ),
    )


def _open_list(sources: Sequence[WeightedSource], key: str | None) -> list[WeightedDataset]:
    if find_pack(Path(sources[0].path)) is not None:
        raise RequestError(
            f"{sources[0].path} is an output of pack, which GPTDataset does not read; specify an output of tokenmill "
            "preprocess, or run tokenmill sft for Megatron-Bridge"
        )
    opened = open_pairs(list(sources), key)
    refuse_rows(opened, "GPTDataset with an index of its own")
    if remote := next((entry for entry in opened for pair in entry.pairs if find_address(Path(pair.prefix))), None):
        raise RequestError(
            f"{show_addresses(remote.path)} is in a bucket, and Megatron-Core maps files; run tokenmill train, which "
            "copies them to each node, or run tokenmill download and use the copy"
        )
    return opened


def _blend(datasets: list[WeightedDataset], samples: int | None, *, divided: bool) -> PrefixList:
    prefixes = [pair.prefix for dataset in datasets for pair in dataset.pairs]
    weights = choose_weights(datasets, samples)
    if len(prefixes) == 1 and not (divided and datasets[0].weight is not None):
        weights = None  # `open` reads it as one pair, and not as a blend
    return PrefixList(prefixes, weights)


def _check_white_space(prefixes: Sequence[str]) -> None:
    for prefix in prefixes:
        if len(prefix.split()) > 1 or prefix != prefix.strip():
            raise RequestError(
                f"{prefix!r} contains white space, at which Megatron-LM splits paths; rename the directory, or use a "
                "symbolic link without white space"
            )
