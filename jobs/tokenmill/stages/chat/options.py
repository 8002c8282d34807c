"""The options of `tokenmill chat`, and the settings that they become."""

import re
from dataclasses import dataclass
from datetime import date as calendar_date
from typing import Annotated

from tokenmill.engine.options import InvalidOption, Option, Panel
from tokenmill.stages.chat.encode import ChatEncoding, Rendering
from tokenmill.stages.chat.lengths import LengthSettings
from tokenmill.stages.chat.rows import RowSettings
from tokenmill.stages.chat.template import BUILTIN
from tokenmill.stages.chat.turns import AnswerFormat, TrainSettings
from tokenmill.tokenize.options import EncodingOptions


def _parse_date(text: str) -> str:
    try:
        return calendar_date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date; write it as 2026-01-31") from error


@dataclass(frozen=True, kw_only=True)
class ChatOptions(EncodingOptions):
    """The options that determine the ids and masks of conversations, and the options of the encoding processes."""

    panel = Panel.CONVERSATIONS

    chat_template: Annotated[
        str,
        Option(
            f"tokenizer (the template of the tokenizer), a .jinja file, or {', '.join(BUILTIN)}.",
            chart="dataset.chatTemplate",
            usual=True,
        ),
    ] = "tokenizer"
    date: Annotated[
        str | None,
        Option(
            "Date that the template writes, such as 2026-01-31. Default: none.",
            metavar="DATE",
            parse=_parse_date,
            chart="rows.date",
        ),
    ] = None
    messages: Annotated[str, Option("Key of the messages in a row.", metavar="KEY", chart="dataset.messages")] = (
        "messages"
    )
    tools: Annotated[str, Option("Key of the tools in a row.", metavar="KEY", chart="dataset.tools")] = "tools"
    role_map: Annotated[
        str | None,
        Option(
            "Further names of roles, such as customer=user,agent=assistant.",
            metavar="NAME=ROLE,...",
            show_default=False,
            chart="dataset.roleMap",
        ),
    ] = None
    tool_arguments: Annotated[
        str,
        Option(
            "Parse JSON strings of tool calls to objects, as inference servers do, or keep them.",
            choices=("parse", "keep"),
            chart="rows.toolArguments",
        ),
    ] = "parse"
    prompt_template: Annotated[
        str,
        Option(
            "Prompt of a row with a prompt and an answer; {prompt} and {system} are inserted.",
            metavar="TEXT",
            chart="rows.promptTemplate",
        ),
    ] = "{prompt}"
    separator: Annotated[
        str,
        Option(
            "Text between such a prompt and its answer; it is part of the answer.",
            metavar="TEXT",
            chart="rows.separator",
        ),
    ] = ""
    strip: Annotated[
        bool, Option("Remove blanks around such a prompt and its answer.", "--strip/--no-strip", chart="rows.strip")
    ] = True
    append_eos: Annotated[
        bool, Option("End such an answer with the eos token.", "--append-eos/--no-append-eos", chart="rows.appendEos")
    ] = True
    train: Annotated[
        str,
        Option(
            "Train all answers, only the last one, or every token of a row.",
            choices=("assistant", "last", "all"),
            chart="train.turns",
            panel=Panel.TRAINED,
            usual=True,
        ),
    ] = "assistant"
    train_reasoning: Annotated[
        bool,
        Option(
            "Train the reasoning of the answers.",
            "--train-reasoning/--no-train-reasoning",
            chart="train.reasoning",
            panel=Panel.TRAINED,
        ),
    ] = True
    train_tool_calls: Annotated[
        bool,
        Option(
            "Train the tool calls of the answers.",
            "--train-tool-calls/--no-train-tool-calls",
            chart="train.toolCalls",
            panel=Panel.TRAINED,
        ),
    ] = True
    train_end: Annotated[
        str,
        Option(
            "Train all that the template writes behind an answer, or only up to its stop token.",
            choices=("turn", "stop"),
            chart="train.end",
            panel=Panel.TRAINED,
        ),
    ] = "turn"
    stop_tokens: Annotated[
        str | None,
        Option(
            "Tokens that end an answer and begin the next message, such as '<|user|>,<|observation|>'.",
            metavar="TOKENS",
            show_default=False,
            chart="train.stopTokens",
            panel=Panel.TRAINED,
        ),
    ] = None
    empty_answer: Annotated[
        str,
        Option(
            "Reject rows with an empty answer, or train its stop token.",
            choices=("reject", "train"),
            chart="rows.emptyAnswer",
            panel=Panel.TRAINED,
        ),
    ] = "reject"
    unrendered: Annotated[
        str,
        Option(
            "Rows with text, tools, tool calls or reasoning that the template leaves out.",
            choices=("reject", "allow"),
            chart="rows.unrendered",
        ),
    ] = "reject"
    special_in_text: Annotated[
        str,
        Option(
            "Special tokens in a message: encode them as such and warn, or reject the row.",
            choices=("keep", "reject"),
            chart="tokenizer.specialInText",
            panel=Panel.TOKENS,
        ),
    ] = "keep"
    max_length: Annotated[
        int | None,
        Option("Tokens of the longest sequence. Default: no limit.", minimum=2, chart="length.maximum", usual=True),
    ] = None
    over_long: Annotated[
        str,
        Option(
            "Drop longer sequences, leave out old turns, cut an answer, divide them, or reject the row.",
            choices=("drop", "trim-history", "terminate", "window", "fail"),
            chart="length.overLong",
        ),
    ] = "drop"
    rendering: Annotated[
        str,
        Option(
            "auto renders rows with the same roles in one form, which is checked; each renders every row.",
            choices=("auto", "each"),
            chart="rendering",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        """Raise InvalidOption for options that contradict each other."""
        self.roles  # noqa: B018 - raises for an invalid map
        if "{prompt}" not in self.prompt_template:
            raise InvalidOption("--prompt-template", "it must contain {prompt}; add {prompt} to it")
        if self.train == "all" and not (self.train_reasoning and self.train_tool_calls):
            option = "--no-train-tool-calls" if self.train_reasoning else "--no-train-reasoning"
            raise InvalidOption(option, "--train all trains every token; choose --train assistant or last with it")
        if self.over_long != "drop" and self.max_length is None:
            raise InvalidOption("--over-long", f"{self.over_long} needs a limit; set --max-length as well")

    @property
    def roles(self) -> dict[str, str]:
        """The pairs of --role-map."""
        pairs: dict[str, str] = {}
        for part in self.role_map.split(",") if self.role_map else ():
            name, equals, role = part.partition("=")
            if not name or not equals or role not in ("system", "developer", "user", "assistant", "tool"):
                raise InvalidOption(
                    "--role-map",
                    f"{part!r} must be NAME=ROLE with one of the roles system, developer, user, assistant and tool; "
                    "write it as customer=user,agent=assistant",
                )
            pairs[name] = role
        return pairs

    def row_choices(self) -> dict[str, object]:
        """Return the options that determine bytes, for the plan."""
        own = [name for name in ChatOptions.__annotations__ if name not in ("role_map", "rendering", "stop_tokens")]
        stops = {"stop_tokens": self.stop_tokens} if self.stop_tokens else {}  # a plan without it stays the same
        return {"roles": self.roles, **{name: getattr(self, name) for name in own}, **stops}

    def encoding(self, rendering: Rendering) -> ChatEncoding:
        """Return the settings of the encoder processes for a resolved template."""
        words = re.findall(r"\w+", rendering.source or "")
        return ChatEncoding(
            rendering=rendering,
            rows=RowSettings(
                messages_key=self.messages,
                tools_key=self.tools,
                role_map=self.roles,
                empty_answer=self.empty_answer,
                keep_arguments=self.tool_arguments == "keep",
                template_words=frozenset(words),
            ),
            train=TrainSettings(
                self.train,
                self.train_reasoning,
                self.train_tool_calls,
                allow_unrendered=self.unrendered == "allow",
            ),
            train_end=self.train_end,
            lengths=LengthSettings(max_length=self.max_length, over_long=self.over_long),
            completion=AnswerFormat(
                self.prompt_template, self.separator, self.strip, self.append_eos, self.unrendered == "allow"
            ),
            use_forms=self.rendering == "auto",
            reject_special=self.special_in_text == "reject",
        )
