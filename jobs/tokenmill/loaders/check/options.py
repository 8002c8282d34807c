"""The options of `tokenmill check-data`."""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.engine.options import InvalidOption, Option, Panel


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The samples that a run requests, and what they are compared with."""

    panel = Panel.SAMPLES

    seq_length: Annotated[
        int, Option("Tokens of a sample; for a pack, its pack size.", minimum=2, maximum=2**31 - 2, show_default=False)
    ]
    samples: Annotated[
        int | None,
        Option(
            "Samples that the run requests of train, or of --part. Default: those of all tokens.",
            minimum=1,
            usual=True,
        ),
    ] = None
    seed: Annotated[int, Option("Seed of the order.", minimum=0, maximum=2**32 - 1, usual=True)] = 1234
    split: Annotated[
        str | None,
        Option("Shares of train, validation and test. Default: all data is train.", metavar="A,B,C", usual=True),
    ] = None
    part: Annotated[
        str | None, Option("Check only this part. Default: all with data.", metavar="[train|validation|test]")
    ] = None
    key: Annotated[str | None, Option("The key to use from datasets with several keys.", metavar="KEY")] = None
    vocab_size: Annotated[
        int | None,
        Option(
            "Rows of the model's embedding, with padding. Default: those that the data's tokenizer needs.",
            minimum=1,
            panel=Panel.MODEL,
        ),
    ] = None
    model: Annotated[
        str | None,
        Option("A preset, such as llama3-8b, instead of --vocab-size.", panel=Panel.MODEL, usual=True),
    ] = None
    framework: Annotated[
        list[str] | None,
        Option(
            "all, megatron-core, automodel, torch, transformers, lightning, torchtitan, deepspeed, grain or "
            "megatron-bridge; repeatable.",
            metavar="NAME",
            usual=True,
        ),
    ] = None
    count: Annotated[int, Option("Number of samples of each part to compare.", minimum=1, usual=True)] = 256
    pad: Annotated[
        int | None,
        Option("Id that Megatron-LM's tokenizer has as pad: read as 0 and not trained.", minimum=0, panel=Panel.MODEL),
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidOption for two sizes of the vocabulary."""
        if self.vocab_size is not None and self.model is not None:
            raise InvalidOption("--vocab-size", "--model sets the model's vocabulary as well; use one of them")
