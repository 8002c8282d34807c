"""The formats in which Megatron-LM's own --sft writes conversations, and the checks that its tokenizer passes them.

The names are those of --sft-tokenizer-prompt-format (megatron/core/tokenizers/text/libraries/sft_tokenizer.py).
Megatron-LM tokenizes a conversation as a whole, and each turn alone to find the loss tokens. It ends with an
AssertionError if the ids differ, after all GPUs are allocated. `conversations` calls these checks before a start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SYSTEM, TURN, STOP = "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"
"""The special tokens of Nemotron's tokenizers that begin a system message and a turn, and end an answer."""


@dataclass(frozen=True)
class PromptFormat:
    """A format: its padding token, the further tokens that the vocabulary must contain, and how it writes a message.

    `prefix` is the text before an answer of which Megatron-LM excludes `prefix_tokens` tokens from the loss.
    """

    name: str
    pad: str
    tokens: tuple[str, ...] = ()
    prefix: str = ""
    prefix_tokens: int = 0
    note: str = ""

    def write(self, role: str, content: str) -> str:
        """Return the text of a message."""
        if self.name == "identity":
            return content
        if role != "assistant" and self.name == "nemotron-nano-v2":
            content = content.replace("/think", "").replace("/no_think", "")
        content = content.strip()
        if role == "system":
            return f"{SYSTEM}System\n{content}\n"
        if role == "user":
            answer = f"{TURN}Assistant\n" if self.name == "nemotron-h-aligned" else ""
            return f"{TURN}User\n{content}\n{answer}"
        end = f"\n{STOP}\n" if self.name == "nemotron-nano-v2" else "\n"
        return f"{self.prefix}{content}{end}"


FORMATS = {
    known.name: known
    for known in (
        PromptFormat("nemotron-nano-v2", "<unk>", (SYSTEM, TURN, STOP), f"{TURN}Assistant\n", 3),
        PromptFormat(
            "nemotron-h-aligned",
            "<SPECIAL_233>",
            (SYSTEM, TURN),
            note="the format nemotron-h-aligned writes no stop token after an answer",
        ),
        PromptFormat(
            "identity",
            "<unk>",
            note="the format identity writes only the contents: they must contain the marks of the roles and the stop "
            "tokens",
        ),
    )
}
"""The formats with which Megatron-LM trains only the answers."""


def find_format(name: str) -> PromptFormat:
    """Return the format with this name; raise RequestError for one that trains every token."""
    if name not in FORMATS:
        raise RequestError(
            f"sft.promptFormat is {name}: with this format Megatron-LM masks nothing, so the run would train the "
            f"questions too; use one of {', '.join(FORMATS)}, or pack the conversations (tokenmill chat, tokenmill "
            "pack) and train with Megatron-Bridge"
        )
    return FORMATS[name]


def check_vocabulary(prompts: PromptFormat, tokenizer: "Tokenizer", directory: Path) -> None:
    """Raise RequestError if the tokenizer lacks a token that the format needs."""
    missing = [token for token in (prompts.pad, *prompts.tokens) if tokenizer.token_to_id(token) is None]
    if missing:
        raise RequestError(
            f"sft.promptFormat is {prompts.name}, which needs the tokens {', '.join((prompts.pad, *prompts.tokens))}, "
            f"but the tokenizer {directory} has no {', '.join(missing)}; use the format of its model, or pack the "
            "conversations (tokenmill chat, tokenmill pack) and train with Megatron-Bridge"
        )
    count = len(_encode(tokenizer, prompts.prefix))
    if count != prompts.prefix_tokens:
        raise RequestError(
            f"sft.promptFormat is {prompts.name}: Megatron-LM excludes the first {prompts.prefix_tokens} tokens of an "
            f"answer from the loss, but the tokenizer {directory} writes {prompts.prefix!r} as {count} tokens; use the "
            "format of its model"
        )


def measure_conversations(prompts: PromptFormat, tokenizer: "Tokenizer", messages: Sequence[Mapping[str, str]]) -> int:
    """Return the number of tokens of a row's conversations.

    Raises:
        ValueError: the ids of a message alone differ from those in its conversation, where Megatron-LM fails.
    """
    total = 0
    for conversation in _split(messages):
        texts = [prompts.write(message["role"], message["content"]) for message in conversation]
        ids, position = _encode(tokenizer, "".join(texts)), 0
        for number, text in enumerate(texts, 1):
            alone = _encode(tokenizer, text)
            if ids[position : position + len(alone)] != alone:
                raise ValueError(
                    f"message {number} of a conversation has other token ids there than alone, as {text[:60]!r}"
                )
            position += len(alone)
        if position != len(ids):
            raise ValueError("a conversation has more token ids than its messages alone")
        total += len(ids)
    return total


def _split(messages: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Return the conversations of a row: each begins at a system message."""
    conversations: list[list[Mapping[str, str]]] = []
    for message in messages:
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
