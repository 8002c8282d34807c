"""The types of transforms: functions of records, and the shapes of the records that the built-in ones write."""

from collections.abc import Callable
from typing import NotRequired, TypedDict

from tokenmill.core.typed_json import JsonObject

Record = JsonObject
Transform = Callable[[Record], Record | None]
"""A function from a record to a record; None drops the record, and an exception rejects it."""


class RejectedRow(Exception):
    """Raise it in a transform to reject a row; the text is the reason, and the stage adds the file and the line."""


class Message(TypedDict):
    """A message of a conversation in OpenAI's form."""

    role: str
    content: str


Conversation = TypedDict("Conversation", {"from": str, "value": str})
"""A turn of a conversation in ShareGPT's form; document 001 calls the turn a conversation."""


class SftRecord(TypedDict):
    """A record that the transform `sft` writes."""

    input: str
    output: str
    system: NotRequired[str]


class OpenAIChatRecord(TypedDict):
    """A record that the transform `openai_chat` writes."""

    messages: list[Message]


class ShareGPTRecord(TypedDict):
    """A record that the transform `sharegpt` writes."""

    conversations: list[Conversation]


class NemotronRLRecord(TypedDict):
    """A record that the transform `nemotron_rl` writes."""

    messages: list[Message]
    tools: NotRequired[list[JsonObject]]


class RankedCompletion(TypedDict):
    """An answer of a preference record; the answer with the lower rank is the better."""

    rank: float
    completion: list[Message]


class PreferenceRecord(TypedDict):
    """A record that the transform `preference` writes: two answers to one context."""

    context: list[Message]
    completions: list[RankedCompletion]


class BinaryPreferenceRecord(TypedDict):
    """A record that the transform `binary_preference` writes."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
