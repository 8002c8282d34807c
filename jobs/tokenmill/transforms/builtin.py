"""The built-in transforms: factories that return a function from a record to a record, or to None.

The first seven are those of document 001. They check keys, and no content: a record without a requested key becomes
None, and is dropped. The others write the shapes that a trainer reads, keep all further keys of a record, and raise
RejectedRow for content that the trainer would refuse or read incorrectly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.transforms.types import Record, RejectedRow, Transform

NO_SYSTEM_TEXT = ""
"""Content of the system message that `megatron_sft` adds: Megatron-LM begins a conversation at a system message."""

_MEGATRON_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class BuiltinTransform:
    """A transform with the call that made it, so that a plan can record it and a child process can make it again."""

    name: str
    arguments: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    apply: Transform = field(repr=False, compare=False)

    def __call__(self, record: Record) -> Record | None:
        """Return the new record, or None to drop it."""
        return self.apply(record)

    def __reduce__(self) -> tuple[Callable[..., Transform], tuple[Any, ...]]:
        """Pickle the call instead of the function."""
        return make_builtin, (self.name, self.arguments, dict(self.named))


def make_builtin(name: str, arguments: tuple[str, ...], named: dict[str, str]) -> Transform:
    """Call the factory with this name.

    Raises:
        KeyError: there is no such factory.
        TypeError: the factory does not take these arguments.
    """
    return BUILTIN[name](*arguments, **named)


def sft(*, input: str = "input", output: str = "output", system: str | None = None) -> Transform:
    """Return a transform to {input, output}, from the keys of prompt and answer; a record may lack the key `system`."""

    def transform(record: Record) -> Record | None:
        if input not in record or output not in record:
            return None
        result = {"input": record[input], "output": record[output]}
        if system is not None and system in record:
            result["system"] = record[system]
        return result

    named = {"input": input, "output": output, **({} if system is None else {"system": system})}
    return _describe("sft", transform, **named)


def openai_chat(*, messages: str = "messages") -> Transform:
    """Return a transform to {messages}: the list under the key `messages`."""
    return _describe("openai_chat", _copy_fields({"messages": messages}), messages=messages)


def sharegpt(*, conversations: str = "conversations") -> Transform:
    """Return a transform to {conversations}: the list under the key `conversations`."""
    return _describe("sharegpt", _copy_fields({"conversations": conversations}), conversations=conversations)


def nemotron_rl() -> Transform:
    """Return a transform from {responses_create_params: {input, tools}} to {messages, tools}; empty tools are left out.

    Every other key is left out, too. Use `nemo_gym` to keep the answers that a verifier needs.
    """

    def transform(record: Record) -> Record | None:
        parameters = record.get("responses_create_params")
        if not isinstance(parameters, dict) or "input" not in parameters:
            return None
        result = {"messages": parameters["input"]}
        if parameters.get("tools"):
            result["tools"] = parameters["tools"]
        return result

    return _describe("nemotron_rl", transform)


def passthrough() -> Transform:
    """Return a transform that changes nothing."""
    return _describe("passthrough", lambda record: record)


def select(*fields: str) -> Transform:
    """Return a transform that keeps these keys; a record that lacks one of them is dropped."""
    return BuiltinTransform("select", fields, (), _copy_fields({name: name for name in fields}))


def rename(**fields: str) -> Transform:
    """Return a transform that keeps keys under new names, as new=old; a record that lacks one of them is dropped."""
    return _describe("rename", _copy_fields(fields), **fields)


def nemo_gym(*, messages: str = "messages", tools: str = "tools") -> Transform:
    """Return a transform to the rows of NeMo Gym: {responses_create_params: {input, tools}, ...}, with all other keys.

    A record that has `responses_create_params` already is checked and not changed. Otherwise its messages and tools
    move there.
    """

    def transform(record: Record) -> Record | None:
        if "responses_create_params" not in record:
            if messages not in record:
                return None
            result = {key: value for key, value in record.items() if key not in (messages, tools)}
            parameters = {"input": record[messages]} | ({"tools": record[tools]} if record.get(tools) else {})
            record = {"responses_create_params": parameters, **result}
        parameters = record["responses_create_params"]
        if not isinstance(parameters, dict) or "input" not in parameters:
            raise RejectedRow("'responses_create_params' is not an object with the key 'input'")
        prompt = parameters["input"]
        if not isinstance(prompt, str):
            _check_messages(prompt, "the input")
        if not prompt:
            raise RejectedRow("the input is empty")
        return record

    return _describe("nemo_gym", transform, messages=messages, tools=tools)


def preference(*, prompt: str = "prompt", chosen: str = "chosen", rejected: str = "rejected") -> Transform:
    """Return a transform to the preference rows of NeMo-RL: {context, completions: [{rank, completion}, ...], ...}.

    It reads such rows, and rows with a prompt and two answers as TRL has them: texts or lists of messages. The answers
    may repeat the prompt, and the key of the prompt may be absent. Both answers must continue one context.
    """

    def transform(record: Record) -> Record | None:
        pair = _read_pair(record, prompt, chosen, rejected)
        if pair is None:
            return None
        context, answers = pair
        used = (prompt, chosen, rejected, "context", "completions")
        other = {key: value for key, value in record.items() if key not in used}
        return {
            "context": context,
            "completions": [{"rank": rank, "completion": completion} for rank, completion in answers],
            **other,
        }

    return _describe("preference", transform, prompt=prompt, chosen=chosen, rejected=rejected)


def binary_preference(*, prompt: str = "prompt", chosen: str = "chosen", rejected: str = "rejected") -> Transform:
    """Return a transform to the binary preference rows of NeMo-RL: {prompt, chosen, rejected, ...}, with texts.

    It reads the rows that `preference` reads. The prompt is a text if the context is a single message of the user,
    otherwise a list of messages.
    """

    def transform(record: Record) -> Record | None:
        pair = _read_pair(record, prompt, chosen, rejected)
        if pair is None:
            return None
        context, answers = pair
        better, worse = (_get_text(completion) for _, completion in sorted(answers, key=lambda answer: answer[0]))
        single = len(context) == 1 and context[0].keys() == {"role", "content"} and context[0]["role"] == "user"
        used = (prompt, chosen, rejected, "context", "completions")
        other = {key: value for key, value in record.items() if key not in used}
        return {
            "prompt": context[0]["content"] if single else context,
            "chosen": better,
            "rejected": worse,
            **other,
        }

    return _describe("binary_preference", transform, prompt=prompt, chosen=chosen, rejected=rejected)


def megatron_sft(*, messages: str = "messages") -> Transform:
    """Return a transform to the rows of Megatron-LM's --sft: {messages}, each conversation after a system message.

    Megatron-LM begins a conversation at each system message, so an empty one is added to a row without it. It knows the
    roles system, user and assistant, reads `content` only, and fails on an empty answer and on one that follows no
    message of the user.
    """

    def transform(record: Record) -> Record | None:
        if messages not in record:
            return None
        result: list[Record] = []
        for number, message in enumerate(_check_messages(record[messages], "the conversation"), 1):
            role, content = message["role"], message.get("content")
            if role not in _MEGATRON_ROLES:
                raise RejectedRow(
                    f"message {number} has the role {role!r}, and Megatron-LM's --sft knows only "
                    f"{', '.join(_MEGATRON_ROLES)}"
                )
            if unread := [key for key in message if key not in ("role", "content") and message[key]]:
                raise RejectedRow(f"message {number} has {unread[0]!r}, which Megatron-LM's --sft does not read")
            if not isinstance(content, str):
                raise RejectedRow(f"message {number} has no text as its content")
            if role == "assistant" and not content:
                raise RejectedRow(f"message {number} is an empty answer")
            if role == "assistant" and (not result or result[-1]["role"] != "user"):
                raise RejectedRow(f"message {number} is an answer that follows no message of the user")
            result.append({"role": role, "content": content})
        if not result:
            raise RejectedRow("the conversation has no message")
        if result[0]["role"] != "system":
            result.insert(0, {"role": "system", "content": NO_SYSTEM_TEXT})
        starts = [index for index, message in enumerate(result) if message["role"] == "system"]
        for start, end in zip(starts, [*starts[1:], len(result)], strict=True):
            if all(message["role"] != "assistant" for message in result[start:end]):
                raise RejectedRow("a conversation has no answer: each system message starts a conversation")
        return {"messages": result}

    return _describe("megatron_sft", transform, messages=messages)


BUILTIN: dict[str, Callable[..., Transform]] = {
    factory.__name__: factory
    for factory in (
        sft,
        openai_chat,
        sharegpt,
        nemotron_rl,
        passthrough,
        select,
        rename,
        nemo_gym,
        preference,
        binary_preference,
        megatron_sft,
    )
}
"""The factories by name. To add a transform, add its factory here."""


def _describe(name: str, transform: Transform, **named: str) -> Transform:
    return BuiltinTransform(name, (), tuple(named.items()), transform)


def _copy_fields(fields: dict[str, str]) -> Transform:
    """Return a transform to a record with these keys, from the keys that are their values."""
    pairs = tuple(fields.items())

    def transform(record: Record) -> Record | None:
        try:
            return {new: record[old] for new, old in pairs}
        except KeyError:
            return None

    return transform


def _check_messages(value: object, name: str) -> list[Record]:
    """Return a list of messages; reject any other value."""
    if not isinstance(value, list):
        raise RejectedRow(f"{name} is not a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RejectedRow(f"message {number} of {name} is not an object with a role")
    return value


_Answer = tuple[float, list[Record]]


def _read_pair(record: Record, prompt: str, chosen: str, rejected: str) -> tuple[list[Record], list[_Answer]] | None:
    """Return the context and the two ranked answers of a preference record; None if it has no such keys."""
    if chosen in record and rejected in record:
        context, better, worse = _read_answers(record.get(prompt), record[chosen], record[rejected])
        answers: list[_Answer] = [(0, better), (1, worse)]
    elif "context" in record and "completions" in record:
        context = _check_messages(record["context"], "the context")
        answers = _read_ranks(record["completions"])
    else:
        return None
    if not context:
        raise RejectedRow("the prompt is empty")
    for number, (_, completion) in enumerate(answers, 1):
        if not completion or completion[0]["role"] != "assistant":
            raise RejectedRow(f"answer {number} does not continue the common context with a message of the assistant")
    if answers[0][1] == answers[1][1]:
        raise RejectedRow("both answers are equal")
    return context, answers


def _read_answers(prompt: object, chosen: object, rejected: object) -> tuple[list[Record], list[Record], list[Record]]:
    """Return the context and both answers of a record as TRL has them."""
    better, worse = (
        [{"role": "assistant", "content": value}] if isinstance(value, str) else list(_check_messages(value, name))
        for value, name in ((chosen, "the chosen answer"), (rejected, "the rejected answer"))
    )
    given: list[Record] = []
    if isinstance(prompt, str):
        given = [{"role": "user", "content": prompt}] if prompt else []
    elif prompt is not None:
        given = _check_messages(prompt, "the prompt")
    if better == worse:
        raise RejectedRow("both answers are equal")
    shared = 0
    while shared < min(len(better), len(worse)) and better[shared] == worse[shared]:
        shared += 1
    context, better, worse = better[:shared], better[shared:], worse[shared:]
    # The answers may repeat the prompt; it may then follow a system message, or come before further turns.
    repeated = any(context[index : index + len(given)] == given for index in range(len(context)))
    return context if repeated else [*given, *context], better, worse


def _read_ranks(completions: object) -> list[_Answer]:
    """Return the two answers of a preference record of NeMo-RL with their ranks."""
    if not isinstance(completions, list) or len(completions) != 2:
        count = f"{len(completions)} completions" if isinstance(completions, list) else "no list of completions"
        raise RejectedRow(f"it has {count}, and a preference needs exactly 2")
    answers: list[_Answer] = []
    for number, entry in enumerate(completions, 1):
        rank = entry.get("rank") if isinstance(entry, dict) else None
        if isinstance(rank, bool) or not isinstance(rank, int | float):
            raise RejectedRow(f"completion {number} has no rank that is a number")
        answers.append((rank, _check_messages(entry.get("completion"), f"completion {number}")))
    if answers[0][0] == answers[1][0]:
        raise RejectedRow(f"both completions have the rank {answers[0][0]}, and a preference needs a better one")
    return answers


def _get_text(completion: list[Record]) -> str:
    """Return the text of an answer that is a single message."""
    content = completion[0].get("content")
    if len(completion) != 1 or not isinstance(content, str):
        raise RejectedRow("an answer is not a single message with a text; use the transform preference")
    return content
