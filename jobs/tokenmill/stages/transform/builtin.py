"""The built-in transforms: factories that return a function from a record to a record, or to None.

The first seven are those of document 001. They check keys, and no content: a record without a requested key becomes
None, and is dropped. The others write the shapes that a trainer reads, keep all further keys of a record, and raise
RejectedRow for content that the trainer would refuse or read incorrectly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.stages.transform.types import Record, RejectedRow, Transform

NO_SYSTEM_TEXT = ""
"""Content of the system message that `megatron_sft` adds: Megatron-LM begins a conversation at a system message."""

_MEGATRON_ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_MESSAGE_LISTS = ("messages", "conversations")
_PAIR = ("context", "completions")
_LABELS = {True: True, False: False, "true": True, "false": False}


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

    It reads such rows, and rows with a prompt and two answers as TRL and LLaMA-Factory have them: texts, messages or
    lists of messages. The answers may repeat the prompt, and the key of the prompt may be absent. Both answers must
    continue one context.
    """

    def transform(record: Record) -> Record | None:
        pair = _read_pair(record, prompt, chosen, rejected)
        if pair is None:
            return None
        context, answers = pair
        return {
            "context": context,
            "completions": [{"rank": rank, "completion": completion} for rank, completion in answers],
            **_get_others(record, _find_prompt(record, prompt, chosen), chosen, rejected, *_PAIR),
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
        return {
            "prompt": context[0]["content"] if single else context,
            "chosen": better,
            "rejected": worse,
            **_get_others(record, _find_prompt(record, prompt, chosen), chosen, rejected, *_PAIR),
        }

    return _describe("binary_preference", transform, prompt=prompt, chosen=chosen, rejected=rejected)


def dpo(*, prompt: str = "prompt", chosen: str = "chosen", rejected: str = "rejected") -> Transform:
    """Return a transform to the preference rows of TRL: {prompt, chosen, rejected, ...}, each a list of messages.

    It reads the rows that `preference` reads.
    """

    def transform(record: Record) -> Record | None:
        pair = _read_pair(record, prompt, chosen, rejected)
        if pair is None:
            return None
        context, answers = pair
        better, worse = (completion for _, completion in sorted(answers, key=lambda answer: answer[0]))
        others = _get_others(record, _find_prompt(record, prompt, chosen), chosen, rejected, *_PAIR)
        return {"prompt": context, "chosen": better, "rejected": worse, **others}

    return _describe("dpo", transform, prompt=prompt, chosen=chosen, rejected=rejected)


def kto(*, prompt: str = "prompt", completion: str = "completion", label: str = "label") -> Transform:
    """Return a transform to the KTO rows of TRL: {prompt, completion, label, ...}, the first two as lists of messages.

    It reads rows with a prompt and a completion as texts or lists of messages, and rows with messages that end with the
    answer. The label is true for a good answer; `kto_tag` is another name of it.
    """

    def transform(record: Record) -> Record | None:
        labelled = _read_labelled(record, prompt, completion, label)
        if labelled is None:
            return None
        context, answer, good = labelled
        others = _get_others(record, _find_prompt(record, prompt), completion, label, "kto_tag")
        return {"prompt": context, "completion": answer, "label": good, **others}

    return _describe("kto", transform, prompt=prompt, completion=completion, label=label)


def good_answers(
    *,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    completion: str = "completion",
    label: str = "label",
) -> Transform:
    """Return a transform from preference data to {prompt, completion, ...}, which the stage chat reads.

    Of two answers it keeps the better one. It drops a row whose label says that its answer is a bad one.
    """

    def transform(record: Record) -> Record | None:
        if (pair := _read_pair(record, prompt, chosen, rejected)) is not None:
            context, answers = pair
            answer, good = min(answers, key=lambda answer: answer[0])[1], True
        elif (labelled := _read_labelled(record, prompt, completion, label)) is not None:
            context, answer, good = labelled
        else:
            return None
        used = (chosen, rejected, completion, label, "kto_tag", *_PAIR)
        others = _get_others(record, _find_prompt(record, prompt, chosen), *used)
        return {"prompt": context, "completion": answer, **others} if good else None

    named = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "completion": completion, "label": label}
    return _describe("good_answers", transform, **named)


def grpo(*, prompt: str = "prompt") -> Transform:
    """Return a transform to the prompts of TRL's GRPO: {prompt, ...}, a list of messages and the keys of the verifier.

    It reads a prompt as a text or as messages, and the rows of NeMo Gym.
    """

    def transform(record: Record) -> Record | None:
        context = _read_prompt(record, prompt)
        return None if context is None else {"prompt": context, **_get_others(record, _find_prompt(record, prompt))}

    return _describe("grpo", transform, prompt=prompt)


def verl(
    *, prompt: str = "prompt", answer: str = "answer", data_source: str = "data_source", source: str = ""
) -> Transform:
    """Return a transform to the rows of verl: {data_source, prompt, reward_model, extra_info}.

    It reads the rows that `grpo` reads, with the correct answer under the key `answer`. verl chooses the reward by
    `data_source`: the value of this key, or `source` for a row without it. All further keys move to `extra_info`, which
    verl passes to the function that computes the reward. A row that has `reward_model` already keeps all its keys.
    """

    def transform(record: Record) -> Record | None:
        context = _read_prompt(record, prompt)
        reward = record.get("reward_model")
        if context is None or (reward is None and answer not in record):
            return None
        named = record.get(data_source) or source
        if not isinstance(named, str) or not named:
            raise RejectedRow(
                f"it has no text under {data_source!r}, by which verl chooses the reward; set source=NAME"
            )
        if reward is None:
            reward = {"style": "rule", "ground_truth": record[answer]}
            used = ("ability", "extra_info", answer, data_source)
            others = _get_others(record, _find_prompt(record, prompt), *used)
            extra = {**others, **(record.get("extra_info") or {})}
            others = {"ability": record["ability"]} if "ability" in record else {}
            others |= {"extra_info": extra} if extra else {}
        elif isinstance(reward, dict) and "ground_truth" in reward:
            others = _get_others(record, _find_prompt(record, prompt), data_source, "reward_model")
        else:
            raise RejectedRow("'reward_model' is not an object with the key 'ground_truth'")
        return {"data_source": named, "prompt": context, "reward_model": reward, **others}

    return _describe("verl", transform, prompt=prompt, answer=answer, data_source=data_source, source=source)


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
        dpo,
        kto,
        good_answers,
        grpo,
        verl,
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


def _read_messages(value: object, name: str, role: str) -> list[Record]:
    """Return the messages of a text, which gets a role, of a message, or of a list of messages; reject other values."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    messages = [value] if isinstance(value, dict) else value
    if isinstance(messages, list):
        messages = [_convert_sharegpt(message) for message in messages]
    return _check_messages(messages, name)


def _convert_sharegpt(message: object) -> object:
    """Return a message with `from` and `value` in OpenAI's form; return other values unchanged."""
    if not isinstance(message, dict) or "role" in message or not isinstance(message.get("from"), str):
        return message
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {
        "role": _SHAREGPT_ROLES.get(message["from"], message["from"]),
        "content": message.get("value"),
        **others,
    }


def _find_prompt(record: Record, prompt: str, chosen: str = "") -> str:
    """Return the key from which the prompt of a record is read; a list of chosen messages contains its prompt."""
    if record.get(prompt) is not None or isinstance(record.get(chosen), list):
        return prompt
    names = ("responses_create_params", *_MESSAGE_LISTS)
    return next((name for name in names if record.get(name) is not None), prompt)


def _read_prompt(record: Record, key: str) -> list[Record] | None:
    """Return the messages of a prompt that an answer can follow; None for a record without one."""
    value = record.get(_find_prompt(record, key))
    if isinstance(value, dict) and "input" in value:
        value = value["input"]
    if value is None:
        return None
    messages = _read_messages(value, "the prompt", "user")
    if not messages:
        raise RejectedRow("the prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise RejectedRow("the prompt ends with an answer, and a trainer samples this answer; remove it")
    return messages


def _get_others(record: Record, *used: str) -> Record:
    """Return a record without the keys that were read, and with the tools of a prompt of NeMo Gym."""
    others = {key: value for key, value in record.items() if key not in used}
    parameters = record.get("responses_create_params") if "responses_create_params" in used else None
    if isinstance(parameters, dict) and parameters.get("tools"):
        others["tools"] = parameters["tools"]
    return others


def _read_labelled(
    record: Record, prompt: str, completion: str, label: str
) -> tuple[list[Record], list[Record], bool] | None:
    """Return the context, the answer and the label of a KTO record; None if it has no such keys."""
    value = record.get(label, record.get("kto_tag"))
    if value is None:
        return None
    good = _LABELS.get(value.lower() if isinstance(value, str) else value) if isinstance(value, str | int) else None
    if good is None:
        raise RejectedRow(f"the label {value!r} is neither true nor false")
    if record.get(prompt) is not None and record.get(completion) is not None:
        context = _read_messages(record[prompt], "the prompt", "user")
        answer = _read_messages(record[completion], "the completion", "assistant")
    else:
        messages = record.get(_find_prompt(record, completion))
        if messages is None:
            return None
        conversation = _read_messages(messages, "the conversation", "user")
        context, answer = conversation[:-1], conversation[-1:]
    if not context:
        raise RejectedRow("the prompt is empty")
    if not answer or answer[0]["role"] != "assistant":
        raise RejectedRow("the answer is not a message of the assistant")
    return context, answer, good


_Answer = tuple[float, list[Record]]


def _read_pair(record: Record, prompt: str, chosen: str, rejected: str) -> tuple[list[Record], list[_Answer]] | None:
    """Return the context and the two ranked answers of a preference record; None if it has no such keys."""
    if chosen in record and rejected in record:
        given = record.get(_find_prompt(record, prompt, chosen))
        context, better, worse = _read_answers(given, record[chosen], record[rejected])
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
        [{"role": "assistant", "content": value}]
        if isinstance(value, str)
        else _read_messages(value, name, "assistant")
        for value, name in ((chosen, "the chosen answer"), (rejected, "the rejected answer"))
    )
    given: list[Record] = [] if prompt is None else _read_messages(prompt, "the prompt", "user")
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
