"""A row of a corpus in one of the usual shapes becomes a Conversation or a PromptAnswer.

Shapes, in the order in which `read_row` looks for them:

    {messages: [{role, content, ...}], tools?, system?}             OpenAI
    {conversations | conversation: [{from, value}], tools?, ...}    ShareGPT; also under `messages`
    {prompt: [messages], completion: [messages] | text}             TRL; only answers of the completion are trained
    {instruction, input? | context?, output | response, system?}    Alpaca, Dolly
    {prompt, completion | response}, {input, output}                a prompt and its answer; both can be messages

The last two may have earlier turns under `history`; such a row is a conversation. A row in another shape, or with a
part which a template cannot render, raises BadRow. A Conversation holds only dicts, lists, text, numbers, booleans and
None, so a template never sees another Python object. Its `unread` names the keys of the row that nothing has read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tokenmill.core.typed_json import JsonObject
from tokenmill.stages.chat import preference
from tokenmill.tokenize.records_encoding import shorten_key

Message = JsonObject

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that templates know."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "human": "user",
        "prompter": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bard": "assistant",
        "bing": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "function": "tool",
        "function_response": "tool",
        "function_result": "tool",
        "observation": "tool",
        "ipython": "tool",
        "function_call": "assistant",
        "tool_call": "assistant",
    }
)
"""Names that public corpora use for the roles. The content of `function_call` and `tool_call` is the JSON of calls."""

_CALL_ROLES = ("function_call", "tool_call")
_FUNCTION_NAMES = ("name", "function_name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "params", "args", "kwargs", "input", "tool_input", "tool_args", "action_input")
"""Keys under which the calls of public corpora have the name of the function and its arguments."""

_CALL_KEYS = frozenset(("id", "index", "type", "function", *_FUNCTION_NAMES, *_ARGUMENTS))
_MESSAGE_LISTS = ("messages", "conversations", "conversation")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_SYSTEM_KEYS = ("system", "system_prompt", "system_message")
_MEDIA_KEYS = tuple(f"{kind}{end}" for kind in ("image", "video", "audio") for end in ("", "s", "_url", "_path"))
"""Keys of a row or message with images, videos or sound, which a text cannot contain."""

_MEDIA_SET = frozenset(_MEDIA_KEYS)
_TURN_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "system": "system",
        **dict.fromkeys(("human", "user", "input"), "user"),
        **dict.fromkeys(("assistant", "gpt", "bot", "output"), "assistant"),
    }
)
"""Keys of an object with a question and its answer, in the order of the messages."""

_CONSUMED = frozenset(
    ("role", "from", "content", "value", "tool_calls", "function_call", "train", "weight", *_REASONING_KEYS)
)
"""Keys of a message with a meaning here; other keys whose value is text, a number or a boolean go to the template."""

_ALTERNATIVES = (("role", "from"), ("content", "value"), ("tool_calls", "function_call"), _REASONING_KEYS)
"""Keys of a message of which only the first one with a value is read."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_COMPLETIONS = (
    ("instruction", ("output", "response")),
    ("prompt", ("completion", "response")),
    ("input", ("output",)),
)
_PART_KEYS = ("instruction", "input", "context", "output", "prompt", "completion", "response", "history")

PREFERENCE = "preference"
"""The code of rows of preference data, which other commands read."""

MAX_DEPTH = 100
"""Levels of lists and objects in tools and arguments."""
MAX_NAMES = 8
"""Number of keys or roles that a message lists."""


class BadRow(Exception):
    """A row cannot be used; `code` is stable, `reason` is a sentence without a final period."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class RowSettings:
    """How rows are read.

    `role_map` adds to ALIASES. `empty_answer` is "reject" or "train": an answer without text and without tool calls.
    `keep_arguments`: the arguments of a tool call stay a JSON string if they are one; otherwise they become an object.
    `template_words`: the words of the chat template, which may read a key of a message by such a name.
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    role_map: Mapping[str, str] = field(default_factory=dict)
    empty_answer: str = "reject"
    keep_arguments: bool = False
    template_words: frozenset[str] = frozenset()

    @cached_property
    def roles(self) -> dict[str, str]:
        """The accepted names of roles."""
        return {**{role: role for role in ROLES}, **ALIASES, **self.role_map}

    @cached_property
    def message_keys(self) -> tuple[str, ...]:
        """The keys that may hold the list of messages."""
        return _MESSAGE_LISTS if self.messages_key == "messages" else (self.messages_key,)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        further = ("functions", *_SYSTEM_KEYS, "chat_template_kwargs", *_PART_KEYS, *_MEDIA_KEYS, *preference.KEYS)
        return tuple(dict.fromkeys((*self.message_keys, self.tools_key, *further)))


@dataclass(slots=True)
class Conversation:
    """Messages for a template.

    Attributes:
        messages: each has `role` and `content` (text, or None next to tool calls); `reasoning_content`, `tool_calls`,
            `tool_call_id`, `name` and other keys only with a value. The arguments of a tool call are an object.
        tools: the descriptions of functions, each as {"type": "function", "function": {...}}; None if there are none.
        variables: variables for the template, from `chat_template_kwargs`.
        train: for each message, its `train` or `weight` as a boolean, or None.
        unread: the keys with a value that were not read, such as `source` or `messages[].score`.
    """

    messages: list[Message]
    tools: list[Any] | None
    variables: JsonObject
    train: list[bool | None]
    unread: Sequence[str] = field(default=(), compare=False)


@dataclass(slots=True)
class PromptAnswer:
    """A prompt and its answer, for a row without messages; `unread` as in Conversation."""

    prompt: str
    answer: str
    system: str | None
    unread: Sequence[str] = field(default=(), compare=False)


def write_arguments(message: Message) -> Message:
    """Return a message with the arguments of each tool call as a JSON string."""
    return {**message, "tool_calls": [_with_string_arguments(call) for call in message["tool_calls"]]}


def _with_string_arguments(call: JsonObject) -> JsonObject:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def read_row(row: object, settings: RowSettings, *, columnar: bool = False) -> Conversation | PromptAnswer:
    """Return what a row contains; raise BadRow if it cannot be used.

    Keys with null are dropped inside tools and arguments, because programs write null for a field that only other rows
    have. JSON strings keep their nulls. `columnar`: the row comes from Parquet or Arrow.
    """
    if not isinstance(row, dict):
        raise BadRow("not_object", f"the row is {_describe(row)}; a row must be an object")
    if len(row) > 1:
        _refuse_media(row, "the row")
        if (label := preference.find_bad_label(row)) is not None:
            raise BadRow(
                PREFERENCE,
                f"the row is data of KTO, and its {label!r} is false: a bad answer is never trained; "
                f"{preference.USE_LABELS}",
            )
    for key in settings.message_keys:
        messages = row.get(key)
        if messages is not None:
            if key in (preference.CHOSEN, preference.REJECTED):
                return _read_chosen(row, key, messages, settings, columnar)
            conversation = _read_conversation(row, key, _divide_turns(messages), settings, columnar)
            if conversation.messages[-1]["role"] != "assistant" and preference.is_pair(row):
                raise BadRow(
                    PREFERENCE,
                    f"the row is preference data: its {key!r} end before the two answers, and chat trains single "
                    f"answers; {preference.USE_PAIRS}",
                )
            return conversation
    if settings.messages_key == "messages":
        return _read_parts(row, settings, columnar)
    raise BadRow(
        "no_messages",
        f"the row has no {settings.messages_key!r} (its keys are {_list(row)}); set --messages to the key of the "
        "messages",
    )


def _refuse_media(value: dict[Any, Any], place: str) -> None:
    """Refuse a row or message with an image, a video or sound."""
    for key in value.keys() & _MEDIA_SET:
        if not _is_empty(value[key]):
            raise BadRow(
                "content_type",
                f"{place} has {key!r}, and only text can be trained; drop the row, or the key if the text needs no "
                f"{key} (tokenmill transform --transform 'select(messages)')",
            )


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {})


def _read_chosen(
    row: dict[Any, Any], key: str, messages: object, settings: RowSettings, columnar: bool
) -> Conversation:
    """Return the conversation of the better answer of a preference row, with its prompt."""
    if key == preference.REJECTED and row.get(preference.CHOSEN) is not None:
        raise BadRow(
            PREFERENCE, f"{key!r} is the bad answer of preference data, which is never trained; {preference.USE_PAIRS}"
        )
    if not isinstance(messages, list):
        raise BadRow(
            PREFERENCE,
            f"the row is preference data, and its {key!r} is {_describe(messages)}, not a list of messages; "
            f"{preference.USE_PAIRS}",
        )
    prompt = row.get("prompt")
    begins = bool(messages) and isinstance(messages[0], dict) and _begins_with_answer(messages[0], settings)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if begins and prompt else []
    elif isinstance(prompt, list):
        prompt = _find_missing_prompt(prompt, messages)
    if begins and not prompt:
        raise BadRow(
            PREFERENCE,
            f"{key!r} begins with an answer, and the row has no 'prompt' with the messages before it; "
            f"{preference.USE_PAIRS}",
        )
    return _join_messages(row, (key, "prompt", preference.REJECTED), prompt or [], messages, settings, columnar)


def _find_missing_prompt(prompt: list[Any], messages: list[Any]) -> list[Any]:
    """Return the messages of a prompt that the chosen messages, which may repeat it, do not begin with."""
    try:
        if prompt in (messages[: len(prompt)], messages[1 : len(prompt) + 1]):
            return []
        return prompt[:1] if len(prompt) > 1 and prompt[1:] == messages[: len(prompt) - 1] else prompt
    except RecursionError:
        raise BadRow("content_type", f"'prompt' is nested more than {MAX_DEPTH} levels deep; drop the row") from None


def _begins_with_answer(message: dict[Any, Any], settings: RowSettings) -> bool:
    name = message.get("role") or message.get("from")
    return isinstance(name, str) and settings.roles.get(name) == "assistant"


def _read_conversation(
    row: dict[Any, Any],
    key: str,
    messages: object,
    settings: RowSettings,
    columnar: bool,
    read: Sequence[str] = (),
) -> Conversation:
    """Return the conversation of a row; `read` has further keys of the row that the caller has read."""
    if not isinstance(messages, list):
        raise BadRow("messages_type", f"{key!r} is {_describe(messages)}; it must be a list of messages")
    if not messages:
        raise BadRow("no_messages", f"{key!r} is an empty list; it must contain messages")
    roles, reject_empty = settings.roles, settings.empty_answer == "reject"
    train: list[bool | None] = [None] * len(messages)
    ready: list[Message] = []
    answers, plain = False, True
    for index, message in enumerate(messages):
        if type(message) is dict and len(message) == 2:  # the common case: a role and a text
            name, content = message.get("role"), message.get("content")
            if (
                type(content) is str
                and type(name) is str
                and roles.get(name) == name
                and (name != "assistant" or (content and not content.isspace()))
                and (content.isascii() or _is_text(content))
            ):
                ready.append(message)
                answers = answers or name == "assistant"
                continue
        plain = False
        result, train[index] = _read_message(message, index + 1, settings, columnar)
        if result["role"] == "assistant":
            answers = True
            if reject_empty and train[index] is not False:
                _check_answer(result, index + 1)
        ready.append(result)
    if not answers:
        raise BadRow("no_answer", "no message has the role assistant, so there is nothing to train; drop the row")
    unread = [] if plain else list(_find_unread_in_messages(messages, key, settings))
    if len(row) == 1:
        return Conversation(ready, None, {}, train, unread)
    system, system_key = _read_system(row)
    if system is not None and ready[0]["role"] != "system":
        ready.insert(0, {"role": "system", "content": system})
        train.insert(0, None)
    elif system is not None and ready[0]["content"] != system:
        raise BadRow(
            "two_systems",
            f"the row has a {system_key!r} and a first message with the role system, which differ; keep one of them",
        )
    tools, tools_key = _read_tools(row, settings, True)
    unread += _find_unread(row, (key, tools_key, system_key, "chat_template_kwargs", *read))
    return Conversation(ready, tools, _read_variables(row, columnar), train, unread)


def _divide_turns(messages: object) -> object:
    """Return the messages of turns such as {human: "q", assistant: "a"}; return any other value unchanged."""
    if not isinstance(messages, list):
        return messages
    divided: list[Any] = []
    for turn in messages:
        if not isinstance(turn, dict) or turn.keys() & {"role", "from"}:
            return messages
        names = [name for name in _TURN_ROLES if not _is_empty(turn.get(name))]
        if len(names) < 2 or len(names) < sum(not _is_empty(value) for value in turn.values()):
            return messages
        divided += [{"role": _TURN_ROLES[name], "content": turn[name]} for name in names]
    return divided


def _find_unread(row: dict[Any, Any], read: Sequence[str]) -> Iterator[str]:
    """Yield the keys of a row that have a value and are not among those that were read."""
    for key, value in row.items():
        if key not in read and not _is_empty(value) and not (key in preference.LABELS and isinstance(value, bool)):
            yield shorten_key(str(key))


def _find_unread_in_messages(messages: list[Any], place: str, settings: RowSettings) -> Iterator[str]:
    """Yield the keys of messages and of their tool calls that nothing reads, once each."""
    names: dict[str, None] = {}
    for message in messages:
        used = {next((key for key in keys if not _is_empty(message.get(key))), "") for keys in _ALTERNATIVES}
        for key, value in message.items():
            known = key in used or key in ("train", "weight", "tool_call_id")
            passed = key not in _CONSUMED and isinstance(value, (str, int, float)) and key in settings.template_words
            if not (known or passed or _is_empty(value)):
                names[f"{place}[].{shorten_key(str(key))}"] = None
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            for level in (call, function):
                if isinstance(level, dict):
                    names |= {
                        f"{place}[].tool_calls[].{shorten_key(str(key))}": None
                        for key, value in level.items()
                        if key not in _CALL_KEYS and not _is_empty(value)
                    }
    yield from names


def _check_answer(message: Message, number: int) -> None:
    content = message["content"]
    if not message.get("tool_calls") and (not content or content.isspace()):
        raise BadRow(
            "empty_answer",
            f"message {number}: the answer is empty, so only its end would be trained; drop the row, or pass "
            "--empty-answer train",
        )


def _read_message(message: object, number: int, settings: RowSettings, columnar: bool) -> tuple[Message, bool | None]:
    """Return a message for a template, and whether it must or must not be trained."""
    if not isinstance(message, dict):
        raise BadRow("message_type", f"message {number} is {_describe(message)}; a message must be an object")
    _refuse_media(message, f"message {number}")
    name, role = _read_role(message, number, settings)
    ready: Message = {"role": role, "content": ""}
    content = message.get("content")
    if content is None:
        content = message.get("value")
    calls = None
    if name in _CALL_ROLES and name not in settings.role_map:
        calls, content = content, None
    else:
        calls = _find_calls(message)
    if calls is not None:
        if role != "assistant":
            raise BadRow("bad_tool_calls", f"message {number}: only the assistant can have tool_calls, not {name!r}")
        ready["tool_calls"] = _read_calls(calls, number, True, settings.keep_arguments)
    if (reasoning := _read_reasoning(message, number)) is not None:
        ready["reasoning_content"] = reasoning
    if content is None and calls is not None:
        ready["content"] = None  # a template can render a call with null in another way than with an empty text
    else:
        if content is None and role == "assistant" and settings.empty_answer == "train":
            content = ""
        ready["content"] = _read_content(content, number, role, settings)
    for key, value in message.items():
        if key not in _CONSUMED and isinstance(key, str) and isinstance(value, (str, int, float)):
            ready[key] = _copy(value, False, f"message {number}: {key!r}")
    return ready, _read_train(message, number)


def _read_role(message: dict[Any, Any], number: int, settings: RowSettings) -> tuple[str, str]:
    """Return the name of the role in the row, and the role."""
    name = message.get("role")
    if name is None:
        name = message.get("from")
    if name is None:
        raise BadRow(
            "no_role", f"message {number} has neither 'role' nor 'from' (its keys are {_list(message)}); name its role"
        )
    role = settings.roles.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or role is None:
        raise BadRow(
            "unknown_role",
            f"message {number}: the role {_shorten(name)} is unknown; map it to one of {', '.join(ROLES)} with "
            "--role-map",
        )
    return name, role


def _read_reasoning(message: dict[Any, Any], number: int) -> str | None:
    """Return the first reasoning that is not empty, or None."""
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if reasoning is None:
            continue
        if not isinstance(reasoning, str):
            raise BadRow(
                "content_type", f"message {number}: {key!r} is {_describe(reasoning)}; the reasoning must be a string"
            )
        if reasoning:
            _check_text(reasoning, f"message {number}: {key!r}")
            return str(reasoning)
    return None


def _find_calls(message: dict[Any, Any]) -> object:
    """Return the tool calls of a message, or None."""
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        return calls
    call = message.get("function_call")  # OpenAI's API before tools
    return None if call is None else [call]


def _read_content(content: object, number: int, role: str, settings: RowSettings) -> str:
    if isinstance(content, str):
        _check_text(content, f"message {number}: its content")
        return str(content)
    if content is None:
        if role == "assistant":
            raise BadRow(
                "empty_answer",
                f"message {number}: the answer has no content and no tool calls; drop the row, or pass --empty-answer "
                "train",
            )
        raise BadRow("null_content", f"message {number}: the content of the {role} is null or missing; it must be text")
    if not isinstance(content, list):
        raise BadRow(
            "content_type",
            f"message {number}: the content is {_describe(content)}; it must be a string or a list of text parts",
        )
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in _TEXT_PARTS:
                raise BadRow(
                    "content_type",
                    f"message {number}: the content has a part of type {_shorten(kind)}; only text parts are supported",
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise BadRow(
                "content_type", f"message {number}: a part of the content is {_describe(text)}; parts must be text"
            )
        _check_text(text, f"message {number}: its content")
        texts.append(text)
    return "".join(texts)


def _read_train(message: dict[Any, Any], number: int) -> bool | None:
    """Return the choice of the keys `train` and `weight`, or None."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRow("bad_train", f"message {number}: 'train' is {_shorten(train)}; it must be true or false")
    if weight is None:
        return train
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise BadRow(
            "bad_weight",
            f"message {number}: the weight is {_shorten(weight)}; it must be 0 or 1, because a mask has only these",
        )
    if train is not None and train != bool(weight):
        raise BadRow("bad_weight", f"message {number}: 'train' and 'weight' contradict each other; keep one of them")
    return bool(weight)


def _read_calls(calls: object, number: int, columnar: bool, keep: bool) -> list[JsonObject]:
    """Return tool calls as {id?, type, function: {name, arguments}} with arguments as an object."""
    if isinstance(calls, str):
        calls, columnar = _parse_json(calls, "bad_tool_calls", f"message {number}: the JSON of its tool calls"), False
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise BadRow(
            "bad_tool_calls", f"message {number}: the tool calls are {_describe(calls)}; they must be a list of calls"
        )
    return [
        _read_call(call, f"message {number}, tool call {index}", columnar, keep) for index, call in enumerate(calls, 1)
    ]


def _read_call(call: object, place: str, columnar: bool, keep: bool) -> JsonObject:
    if isinstance(call, str):
        call, columnar = _parse_json(call, "bad_tool_calls", f"{place}: its JSON"), False
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, (dict, str, type(None))):
        raise BadRow("bad_tool_calls", f"{place} is {_describe(call)}; it must be an object with a function")
    levels = [call]
    if function is not None:
        levels.insert(0, {"name": function} if isinstance(function, str) else function)
    name = next((level[key] for level in levels for key in _FUNCTION_NAMES if level.get(key) is not None), None)
    if not isinstance(name, str) or not name:
        raise BadRow("bad_tool_calls", f"{place}: the name of the function is {_shorten(name)}; it must be a string")
    _check_text(name, f"{place}: its name")
    text, arguments = _find_arguments(levels, place, columnar)
    ready: JsonObject = {}
    identifier = call.get("id")
    if identifier is not None:
        if not isinstance(identifier, (str, int)):
            raise BadRow("bad_tool_calls", f"{place}: its id is {_describe(identifier)}; it must be a string")
        ready["id"] = _copy(identifier, False, f"{place}: its id")
    ready["type"] = "function"
    ready["function"] = {"name": name, "arguments": text if keep and isinstance(text, str) else arguments}
    return ready


def _find_arguments(levels: list[dict[Any, Any]], place: str, columnar: bool) -> tuple[object, JsonObject]:
    """Return the arguments of a call as the row has them and as an object; `levels` are the objects of the call."""
    values = [(key, level[key]) for level in levels for key in _ARGUMENTS if level.get(key) is not None]
    if not values:
        keys = ", ".join(_list(level) for level in levels)
        raise BadRow(
            "bad_tool_calls",
            f"{place} has no arguments (its keys are {keys}); name them 'arguments', and write {{}} for a call without "
            "arguments",
        )
    objects = []
    for key, value in values:
        arguments = value
        if isinstance(value, str):
            arguments = _parse_json(value, "bad_tool_calls", f"{place}: the JSON of its {key}")
        if not isinstance(arguments, dict):
            raise BadRow(
                "bad_tool_calls",
                f"{place}: the {key} are {_describe(arguments)}; they must be an object, such as {{}}",
            )
        # a string keeps the nulls that its author wrote
        objects.append(_copy(arguments, columnar and arguments is value, place, "bad_tool_calls"))
    if any(arguments != objects[0] for arguments in objects[1:]):
        names = " and ".join(dict.fromkeys(repr(key) for key, _ in values))
        raise BadRow("bad_tool_calls", f"{place} has different arguments under {names}; keep one of them")
    return values[0][1], objects[0]


def _read_tools(row: dict[Any, Any], settings: RowSettings, columnar: bool) -> tuple[list[Any] | None, str]:
    """Return the tools of a row, and their key."""
    key = settings.tools_key
    tools = row.get(key)
    if tools is None and key == "tools":
        key = "functions"  # OpenAI's API before tools
        tools = row.get(key)
    if isinstance(tools, str):
        if not tools.strip():
            return None, key
        tools, columnar = _parse_json(tools, "bad_tools", f"the JSON of {key!r}"), False
    if tools is None:
        return None, key
    if not isinstance(tools, list):
        raise BadRow("bad_tools", f"{key!r} is {_describe(tools)}; it must be a list of tools, or the JSON of one")
    read = [_read_tool(tool, f"{key!r}, tool {number}", columnar) for number, tool in enumerate(tools, 1)]
    return read or None, key


def _read_tool(tool: object, place: str, columnar: bool) -> JsonObject:
    if isinstance(tool, str):
        tool, columnar = _parse_json(tool, "bad_tools", f"{place}: its JSON"), False
    if not isinstance(tool, dict):
        raise BadRow("bad_tools", f"{place} is {_describe(tool)}; it must be an object")
    ready: JsonObject = _copy(tool, columnar, place, "bad_tools")
    if not isinstance(ready.get("function"), dict):  # without the level "function", as in OpenAI's newer API
        ready = {"type": "function", "function": {key: value for key, value in ready.items() if key != "type"}}
    function = ready["function"]
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow("bad_tools", f"{place}: the name of the function is {_shorten(name)}; it must be a string")
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _parse_json(
            function["parameters"], "bad_tools", f"{place}: the JSON of its parameters"
        )
    return ready


def _read_system(row: dict[Any, Any]) -> tuple[str | None, str]:
    """Return the text for the system of a row, and its key; a row may have it under several names."""
    systems = [(key, row[key]) for key in _SYSTEM_KEYS if row.get(key) not in (None, "")]
    for key, system in systems:
        if not isinstance(system, str):
            raise BadRow("content_type", f"{key!r} is {_describe(system)}; it must be a string")
        _check_text(system, repr(key))
        if system != systems[0][1]:
            raise BadRow("two_systems", f"the row has {systems[0][0]!r} and {key!r}, which differ; keep one of them")
    return (str(systems[0][1]), systems[0][0]) if systems else (None, _SYSTEM_KEYS[0])


def _read_variables(row: dict[Any, Any], columnar: bool) -> JsonObject:
    variables = row.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _parse_json(variables, "bad_variables", "the JSON of 'chat_template_kwargs'") if variables else None
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise BadRow("bad_variables", f"'chat_template_kwargs' is {_describe(variables)}; it must be an object")
    ready: JsonObject = {}
    for name, value in variables.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _RESERVED:
            raise BadRow(
                "bad_variables",
                f"'chat_template_kwargs': {_shorten(name)} cannot be a variable of a template; rename it",
            )
        if value is not None and not isinstance(value, (str, int, float)):
            raise BadRow(
                "bad_variables",
                f"'chat_template_kwargs': {name!r} is {_describe(value)}; it must be text, a number or a boolean",
            )
        if value is not None or not columnar:
            ready[name] = _copy(value, False, f"'chat_template_kwargs': {name!r}", "bad_variables")
    return ready


def _read_parts(row: dict[Any, Any], settings: RowSettings, columnar: bool) -> Conversation | PromptAnswer:
    """Return a row that has a prompt and an answer under separate keys."""
    for prompt_key, answer_keys in _COMPLETIONS:
        prompt = row.get(prompt_key)
        answer_key = next((key for key in answer_keys if row.get(key) is not None), None)
        if answer_key is None:
            answer_key = next((key for key in answer_keys if key in row), None)
        if prompt is None or answer_key is None:
            continue
        answer = row[answer_key]
        read: tuple[str, ...] = (prompt_key, answer_key)
        if isinstance(prompt, list) and isinstance(answer, (list, str)):
            answer = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
            return _join_messages(row, read, prompt, answer, settings, columnar)
        prompt = _read_part(prompt, prompt_key)
        if prompt_key == "instruction":
            extra_key = next((key for key in ("input", "context") if not _is_empty(row.get(key))), None)
            extra = "" if extra_key is None else _read_part(row[extra_key], extra_key)
            if extra and not extra.isspace():
                prompt = f"{prompt}\n\n{extra}"
            read = (*read, extra_key or "input")
        answer = _read_part(answer, answer_key)
        if settings.empty_answer == "reject" and (not answer or answer.isspace()):
            raise BadRow("empty_answer", f"{answer_key!r} is empty; drop the row, or pass --empty-answer train")
        if not _is_empty(history := row.get("history")):
            turns = [*_read_history(history), {"role": "user", "content": prompt}]
            turns.append({"role": "assistant", "content": answer})
            return _read_conversation(row, "history", turns, settings, columnar, read)
        system, system_key = _read_system(row)
        return PromptAnswer(prompt, answer, system, list(_find_unread(row, (*read, system_key))))
    if preference.is_pair(row):
        raise BadRow(
            PREFERENCE,
            f"the row is preference data (its keys are {_list(row)}), and chat trains single answers; "
            f"{preference.USE_PAIRS}",
        )
    raise BadRow(
        "no_messages",
        f"the row has no 'messages', and no prompt with an answer (its keys are {_list(row)}); set --messages to the "
        "key of the messages",
    )


def _read_history(history: object) -> list[Any]:
    """Return the messages of earlier turns: pairs of a question and its answer, or messages."""
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        divided: Any = _divide_turns(history)
        return [*divided]
    turns: list[Any] = []
    for turn in history if isinstance(history, list) else (history,):
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            raise BadRow(
                "messages_type",
                f"'history' contains {_describe(turn)}; it must be a list of earlier turns, each as [question, answer]",
            )
        turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return turns


def _join_messages(
    row: dict[Any, Any],
    read: Sequence[str],
    prompt: list[Any],
    answer: list[Any],
    settings: RowSettings,
    columnar: bool,
) -> Conversation:
    """Return the conversation of a prompt and a completion that are lists of messages."""
    conversation = _read_conversation(row, "completion", [*prompt, *answer], settings, columnar, read)
    added = len(conversation.messages) - len(prompt) - len(answer)
    for index in range(added + len(prompt)):
        conversation.train[index] = False
    return conversation


def _read_part(value: object, key: str) -> str:
    if not isinstance(value, str):
        code = "null_content" if value is None else "content_type"
        raise BadRow(code, f"{key!r} is {_describe(value)}; it must be a string")
    _check_text(value, repr(key))
    return str(value)


def _parse_json(text: str, code: str, subject: str) -> Any:
    """Return the value of a JSON text; raise BadRow with the position of the error."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos + 1:,}"
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise BadRow(code, f"{subject} is invalid ({reason}); correct it")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _copy(value: Any, columnar: bool, place: str, code: str = "content_type", depth: int = 0) -> Any:
    """Return a copy of a JSON value without null keys if it is columnar; raise BadRow for any other value."""
    if isinstance(value, str):
        _check_text(value, place)
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= MAX_DEPTH:
        raise BadRow(code, f"{place} is nested more than {MAX_DEPTH} levels deep; drop the row")
    if isinstance(value, list):
        return [_copy(item, columnar, place, code, depth + 1) for item in value]
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadRow(code, f"{place} has the key {_shorten(key)}; keys must be text")
            if item is None and columnar:
                continue
            _check_text(key, place)
            copy[str(key)] = _copy(item, columnar, place, code, depth + 1)
        return copy
    raise BadRow(code, f"{place} contains {_describe(value)}; only JSON values can be rendered")


def _check_text(text: str, subject: str) -> None:
    if not text.isascii() and not _is_text(text):
        raise BadRow("bad_text", f"{subject} contains a lone surrogate, which is not a character; correct the text")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


def _describe(value: object) -> str:
    """Return the kind of a value in the words of JSON."""
    if value is None:
        return "null"
    return next((name for kind, name in _NAMES if isinstance(value, kind)), f"a value of type {type(value).__name__}")


def _shorten(value: object) -> str:
    """Return a value for a message: short text in quotes, another value by its kind."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else f"{value[:60]}...")
    if isinstance(value, (bool, int, float)) and (not isinstance(value, int) or value.bit_length() < 64):
        return str(value).lower()
    return _describe(value)


def _list(row: dict[Any, Any]) -> str:
    """Return the first keys of an object, for a message."""
    names = [_shorten(key) for key in list(row)[:MAX_NAMES]]
    more = len(row) - len(names)
    return (", ".join(names) + (f" and {more} more" if more else "")) or "not there: it is empty"
