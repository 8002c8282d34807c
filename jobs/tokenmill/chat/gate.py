"""Find the chat template at plan time, and check that it renders what will be trained.

The gate renders probes and the first rows. It fails with exit code 2 and both texts if a model could not learn from the
result: the answer's text or the token that ends it is not rendered, or a prompt is not a prefix of its conversation.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.chat.encode import ChatEncoder, ChatEncoding, Rendering
from tokenmill.chat.options import ChatOptions
from tokenmill.chat.rows import BadRow, PromptAnswer, read_row
from tokenmill.chat.template import BUILTIN, ChatTemplate, RenderError, builtin_source
from tokenmill.chat.turns import NO_PROMPT, THINKING_VARIABLES, UNRENDERED
from tokenmill.errors import RequestError
from tokenmill.tokens import sentencepiece_model

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template can use as variables."""

MAX_TEMPLATE_BYTES = 256 << 10
"""Bytes of the largest accepted template; the largest known ones have some 20 kB."""

_QUESTION, _ANSWER = "Question of the probe", "Answer of the probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_EXCERPT = 400


class Row(NamedTuple):
    """One of the first rows of the input, with its file and its line there."""

    place: str
    value: dict[str, Any]
    columnar: bool


class Tokenizer(NamedTuple):
    """The parts of a tokenizer that the gate needs: its files, its backend JSON and its eos token."""

    directory: Path
    backend: Path
    eos_token: str | None
    reference: str


def resolve_rendering(options: ChatOptions, tokenizer: Tokenizer, rows: Sequence[Row]) -> Rendering:
    """Return the template of a plan and what the probes show of it; check it with the first rows.

    Raises:
        RequestError: there is no template, or it cannot be used for the rows.
    """
    backend = _read_json(tokenizer.backend)
    variables, tokens = _read_special_tokens(tokenizer, backend)
    end = (tokenizer.eos_token or variables.get("eos_token", "")) if options.append_eos else ""
    if not _has_messages(options, rows):
        source = None
        if options.append_eos and not end:
            raise RequestError(
                f"the tokenizer {tokenizer.reference} defines no eos token to end the answers with; choose another "
                "tokenizer, or pass --no-append-eos"
            )
        rendering = Rendering(source=None, special_tokens=tuple(tokens), end=end, stop_ids=_ids(tokens, [end]))
    else:
        name, source = _find_template(options.chat_template, tokenizer)
        template = ChatTemplate(source, name=name, variables=variables, date=options.date)
        rendering = _probe(template, name, variables, tokens, options, end)
    rendering = replace(rendering, whole=_writes_blank(backend))
    if rendering.whole and tokenizer.backend.with_name(sentencepiece_model.FILE_NAME).exists():
        raise RequestError(
            f"the tokenizer {tokenizer.reference} has only a SentencePiece model that writes a blank in front of every "
            "text, so an answer cannot be encoded apart from its prompt; use a release of it with tokenizer.json"
        )
    _check_rows(options, options.encoding(rendering), rows)
    return rendering


def _writes_blank(backend: dict[str, Any]) -> bool:
    """Return whether the tokenizer writes a blank in front of every text, from its backend JSON."""
    parts = [backend.get("normalizer"), backend.get("pre_tokenizer")]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        parts += part.get("normalizers") or part.get("pretokenizers") or []
        kind = part.get("type")
        if kind == "Prepend" or (kind == "ByteLevel" and part.get("add_prefix_space")):
            return True
        if kind == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def _has_messages(options: ChatOptions, rows: Sequence[Row]) -> bool:
    """Return whether a row is a conversation; without valid rows, assume it."""
    settings = options.encoding(Rendering(source=None)).rows
    kinds = []
    for row in rows:
        try:
            kinds.append(isinstance(read_row(row.value, settings, columnar=row.columnar), PromptAnswer))
        except BadRow:
            continue
    return not kinds or not all(kinds)


def _read_special_tokens(tokenizer: Tokenizer, backend: dict[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the special tokens by the names that templates use, and the ids of all added special tokens."""
    config = _read_json(tokenizer.directory / "tokenizer_config.json") | _read_json(
        tokenizer.directory / "special_tokens_map.json"
    )
    variables: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    tokens = {
        token["content"]: token["id"]
        for token in backend.get("added_tokens", [])
        if token.get("special") and token.get("content")
    }
    decoder = config.get("added_tokens_decoder")
    if not tokens and isinstance(decoder, dict):  # the vocabulary is a SentencePiece model
        tokens = {
            token["content"]: int(number)
            for number, token in decoder.items()
            if isinstance(token, dict) and token.get("special") and token.get("content") and number.isdecimal()
        }
    return variables, tokens


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); use the files of one release of the tokenizer") from error
    return value if isinstance(value, dict) else {}


def _find_template(choice: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the name and the source of the chosen template."""
    if choice in BUILTIN:
        return f"the built-in template {choice}", builtin_source(choice)
    if choice != "tokenizer":
        path = Path(choice)
        if not path.is_file():
            raise RequestError(
                f"--chat-template {choice}: there is no such file, and no built-in template has this name; choose "
                f"tokenizer, a .jinja file, or one of {', '.join(BUILTIN)}"
            )
        return str(path), _read_text(path)
    path = tokenizer.directory / "chat_template.jinja"
    if path.is_file():
        return f"{tokenizer.reference}/chat_template.jinja", _read_text(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = _read_json(tokenizer.directory / name).get("chat_template")
        if isinstance(value, list):
            named = {part.get("name"): part.get("template") for part in value if isinstance(part, dict)}
            value = named.get("default") or next(iter(named.values()), None)
        if isinstance(value, str) and value.strip():
            return f"the chat template of {tokenizer.reference}", value
    raise RequestError(
        f"the tokenizer {tokenizer.reference} has no chat template; pass --chat-template with a .jinja file or one of "
        f"the built-in templates {', '.join(BUILTIN)}"
    )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise RequestError(
                f"{path} is larger than {MAX_TEMPLATE_BYTES:,} bytes, the limit for a chat template; pass a template"
            )
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: the chat template is not UTF-8; save it as UTF-8") from error


def _probe(
    template: ChatTemplate,
    name: str,
    variables: dict[str, str],
    tokens: dict[str, int],
    options: ChatOptions,
    end: str,
) -> Rendering:
    """Return what the template does with a short conversation; refuse one that a model cannot learn from."""
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    try:
        before = template.render([question], None)
        after = template.render([question, answer], None)
    except RenderError as error:
        raise RequestError(
            f"{_place(name, error)}: it cannot render a question and an answer ({error.reason}); correct the template"
        ) from error
    prompts = _find_prompts(template, [question], before)
    if not prompts and not template.has_generation_tags and options.train != "all":
        raise RequestError(
            f"{name} writes no generation prompt: with add_generation_prompt it renders {_excerpt(before)}, without a "
            "header for the answer, so the start of an answer is unknown; correct the template, or mark the answers "
            "in it with {% generation %}"
        )
    if _ANSWER not in after:
        raise RequestError(f"{name} does not render the answer {_ANSWER!r}: it writes {_excerpt(after)}; correct it")
    tail = after[after.rindex(_ANSWER) + len(_ANSWER) :]
    stops = [token for token in tokens if token in tail]
    if not stops:
        raise RequestError(
            f"{name} ends an answer with {tail!a}, which contains no special token of the tokenizer, so a model would "
            f"never learn to stop: the probe is {_excerpt(after)}; choose a template that fits the tokenizer"
        )
    if template.has_generation_tags and options.train != "all":
        text, spans = template.render_tagged([question, answer], None)
        trained = "".join(text[begin:stop] for begin, stop in spans)
        if not any(token in trained for token in stops) or _ANSWER not in trained:
            raise RequestError(
                f"{name}: its generation blocks contain {trained!a}, but the answer is {_ANSWER + tail!a}, so its stop "
                f"token {stops[0]!a} would not be trained; move the end of the block behind the stop token"
            )
    return Rendering(
        source=template.source,
        name=Path(name).name if name == options.chat_template else name,  # a plan does not depend on directories
        variables=variables,
        date=options.date,
        prompts=prompts,
        string_arguments=_needs_string_arguments(template, question),
        stop_ids=_ids(tokens, [*stops, end]),
        special_tokens=tuple(tokens),
        end=end,
    )


def _ids(tokens: dict[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({tokens[name] for name in names if name in tokens}))


def _find_prompts(template: ChatTemplate, messages: list[dict[str, Any]], before: str) -> tuple[str, ...]:
    """Return the generation prompts for each setting of the thinking variables, longest first."""
    names = [name for name in THINKING_VARIABLES if name in template.reads]
    prompts: set[str] = set()
    for variables in ({}, *(dict.fromkeys(names, value) for value in (True, False) if names)):
        try:
            text = template.render(messages, None, add_generation_prompt=True, **variables)
        except RenderError:
            continue
        if text.startswith(before) and len(text) > len(before):
            prompts.add(text[len(before) :])
    return tuple(sorted(prompts, key=lambda prompt: (-len(prompt), prompt)))


def _needs_string_arguments(template: ChatTemplate, question: dict[str, Any]) -> bool:
    """Return whether the template renders a tool call only if its arguments are a JSON string."""
    arguments = {"city": "Probe City"}

    def renders(value: object) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": value}}
        messages = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "call00001", "name": "probe_tool"},
        ]
        try:
            return "Probe City" in template.render(messages, [_PROBE_TOOL])
        except RenderError:
            return False

    return not renders(arguments) and renders(json.dumps(arguments))


def _check_rows(options: ChatOptions, encoding: ChatEncoding, rows: Sequence[Row]) -> None:
    """Refuse a template that does not fit one of the first rows; rows that are bad themselves are rejected later."""
    cutter = RowCutter(encoding)
    first: tuple[Row, BadRow] | None = None
    good = 0
    for row in rows:
        try:
            cutter.chunk_texts(row.value, columnar=row.columnar)
            good += 1
        except BadRow as error:
            if error.code == NO_PROMPT or error.code.startswith(UNRENDERED):
                raise RequestError(f"{row.place}: {error.reason}") from error
            first = first or (row, error)
    if first and not good:
        row, bad = first
        raise RequestError(
            f"{row.place}: {bad.reason}. None of the first {len(rows):,} rows can be trained on; correct the rows, "
            "or choose other options for them"
        )


class RowCutter(ChatEncoder):
    """Cuts rows into the texts of their chunks without an encoder, at plan time."""

    def __init__(self, encoding: ChatEncoding) -> None:
        """Compile the template."""
        super().__init__(encoding, None, Path())  # type: ignore[arg-type]


def _place(name: str, error: RenderError) -> str:
    return f"{name}, line {error.line}" if error.line else name


def _excerpt(text: str) -> str:
    return ascii(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")
