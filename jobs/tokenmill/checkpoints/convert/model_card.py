"""README.md of an exported model: what it was trained on, from which weights, and for how long.

`exporter` writes it. The front matter has the fields of the Hub's model cards
(https://huggingface.co/docs/hub/model-cards).
"""

from typing import NamedTuple

from tokenmill import __version__
from tokenmill.checkpoints.model_record import ModelRecord
from tokenmill.core.printing import printable

DATASET = "hf://datasets/"


class ExportedModel(NamedTuple):
    """The facts of a model card."""

    architecture: str
    """Name of the class in transformers."""
    parameters: int
    base: tuple[str, str | None] | None
    """Address and commit of the model that was imported at the start."""
    iteration: int | None
    """Iteration of the checkpoint; None for imported weights without training."""
    record: ModelRecord | None
    """Record of the run."""

    @property
    def base_name(self) -> str | None:
        """Return the name of the imported model."""
        return self.base[0].removeprefix("hf://").removeprefix("models/") if self.base else None


def write_model_card(model: ExportedModel, hashes: dict[str, str]) -> str:
    """Return the text of the model card; `hashes` has the SHA-256 of each weight file."""
    return "\n".join(
        [*_front_matter(model), "", "# Model", "", *_describe_training(model), "", *_list_files(hashes), ""]
    )


def _front_matter(model: ExportedModel) -> list[str]:
    import yaml

    fields: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if model.base and model.base[0].startswith("hf://"):
        fields["base_model"] = model.base_name
    origins = [data.origin for data in model.record.data] if model.record else []
    datasets = [origin.removeprefix(DATASET).partition("@")[0] for origin in origins if origin.startswith(DATASET)]
    if datasets:
        fields["datasets"] = sorted(set(datasets))
    fields["tags"] = ["megatron-lm", "tokenmill"]
    return ["---", str(yaml.safe_dump(fields, sort_keys=False)).rstrip(), "---"]


def _describe_training(model: ExportedModel) -> list[str]:
    lines = [
        f"{model.architecture} with {model.parameters:,} parameters, exported by tokenmill {__version__} from "
        "Megatron-LM.",
        "",
    ]
    if model.base:
        revision = f" at {model.base[1]}" if model.base[1] else ""
        lines.append(f"- Initial weights: {_escape(model.base_name or '')}{revision}")
    record = model.record
    if model.iteration is None or record is None:
        return [*lines, "- Trained: no further training is recorded"]
    tokens = model.iteration * record.batch * record.sequence_length
    lines += [
        f"- Trained: iteration {model.iteration:,}, {tokens:,} tokens in sequences of {record.sequence_length:,}",
        f"- Tokenizer: {_escape(record.tokenizer)}, {record.vocabulary:,} ids",
        "",
        "| data | content | tokens | share |",
        "|---|---|---|---|",
    ]
    return lines + [
        f"| {_escape(data.origin or data.path)} | `{data.content[:16]}` | {data.tokens:,} | {data.share:.2%} |"
        for data in record.data
    ]


def _list_files(hashes: dict[str, str]) -> list[str]:
    return ["| file | SHA-256 |", "|---|---|", *(f"| {name} | `{digest}` |" for name, digest in hashes.items())]


def _escape(text: str) -> str:
    """Return text from a dataset's record, so that it cannot change the structure of the card."""
    start = printable(text, 300)
    return "".join(f"\\{character}" if character in "\\`*_|[]<>#!" else character for character in start)
