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
from tokenmill.chat.untrained import common_prefix
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
    variables, tokens, ordinary = _read_special_tokens(tokenizer, backend)
    end = (tokenizer.eos_token or variables.get("eos_token", "")) if options.append_eos else ""
    try:
        name, source = _find_template(options.chat_template, tokenizer)
        template = ChatTemplate(source, name=name, variables=variables, date=options.date)
        rendering = _probe(template, name, variables, tokens, ordinary, options, end)
    except RequestError:
        if _has_messages(options, rows) or options.chat_template not in ("tokenizer", *BUILTIN):
            raise
        # Rows with a prompt and an answer need no template; a later row with messages is a bad record.
        stops = _ids(tokens | ordinary, [end])
        rendering = Rendering(source=None, special_tokens=tuple(tokens), end=end, stop_ids=stops)
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


def _read_special_tokens(
    tokenizer: Tokenizer, backend: dict[str, Any]
) -> tuple[dict[str, str], dict[str, int], dict[str, int]]:
    """Return the special tokens by the names that templates use, and the ids of the added tokens.

    The second value has the special tokens, the third one the other added tokens that are not blank.
    """
    config = _read_json(tokenizer.directory / "tokenizer_config.json") | _read_json(
        tokenizer.directory / "special_tokens_map.json"
    )
    variables: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    added = [
        (token["content"], token["id"], token.get("special"))
        for token in backend.get("added_tokens", [])
        if token.get("content")
    ]
    decoder = config.get("added_tokens_decoder")
    if not any(special for *_, special in added) and isinstance(decoder, dict):  # a SentencePiece model
        added = [
            (token["content"], int(number), token.get("special"))
            for number, token in decoder.items()
            if isinstance(token, dict) and token.get("content") and number.isdecimal()
        ]
    tokens = {content: number for content, number, special in added if special}
    ordinary = {content: number for content, number, special in added if not special and content.strip()}
    return variables, tokens, ordinary


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
                f"invalid --chat-template {choice!r}: there is no such file, and no built-in template has this name; "
                f"choose tokenizer, a .jinja file, or one of {', '.join(BUILTIN)}"
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
    ordinary: dict[str, int],
    options: ChatOptions,
    end: str,
) -> Rendering:
    """Return what the template does with a short conversation; refuse one that a model cannot learn from."""
    answer = {"role": "assistant", "content": _ANSWER}
    question, before, after = _render_probe(template, name, answer)
    prompts, begins = _find_prompts(template, question, before, after)
    if not prompts and not begins and not template.has_generation_tags and options.train != "all":
        raise RequestError(
            f"{name} writes no generation prompt: with add_generation_prompt it renders {_excerpt(before)}, without a "
            "header for the answer, so the start of an answer is unknown; correct the template, or mark the answers "
            "in it with {% generation %}"
        )
    if _ANSWER not in after:
        raise RequestError(f"{name} does not render the answer {_ANSWER!r}: it writes {_excerpt(after)}; correct it")
    tail = after[after.rindex(_ANSWER) + len(_ANSWER) :]
    stops = [token for token in tokens if token in tail] or [token for token in ordinary if token in tail]
    if not stops:
        raise RequestError(
            f"{name} ends an answer with {tail!a}, which contains no special token of the tokenizer, so a model would "
            f"never learn to stop: the probe is {_excerpt(after)}; choose a template that fits the tokenizer, or add "
            "the stop token to a copy of this one"
        )
    if template.has_generation_tags and options.train != "all":
        if not (options.train_reasoning and options.train_tool_calls):
            raise RequestError(
                f"{name} marks the trained text with generation blocks, so --no-train-reasoning and "
                "--no-train-tool-calls cannot leave out a part of it; remove these options, or choose a template "
                "without these blocks"
            )
        text, spans = template.render_tagged([*question, answer], None)
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
        stop_ids=_ids(tokens | ordinary, [*stops, end]),
        special_tokens=tuple(tokens),
        end=end,
    )


def _ids(tokens: dict[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({tokens[name] for name in names if name in tokens}))


def _render_probe(template: ChatTemplate, name: str, answer: dict[str, Any]) -> tuple[list[dict[str, Any]], str, str]:
    """Return a question, with a system message if the template requires one, and its texts without and with answer."""
    question, system = {"role": "user", "content": _QUESTION}, {"role": "system", "content": "System of the probe"}
    first: RenderError | None = None
    for messages in ([question], [system, question]):
        try:
            return messages, template.render(messages, None), template.render([*messages, answer], None)
        except RenderError as error:
            first = first or error
    assert first is not None  # noqa: S101
    remedy = "pass --date" if "strftime_now" in first.reason else "correct the template"
    raise RequestError(
        f"{_place(name, first)}: it cannot render a question and an answer ({first.reason}); {remedy}"
    ) from first


def _find_prompts(
    template: ChatTemplate, messages: list[dict[str, Any]], before: str, after: str
) -> tuple[tuple[str, ...], bool]:
    """Return the generation prompts for each setting of the thinking variables, longest first.

    The second value is whether the answer can begin without one of them: the text `after` begins with another prompt
    (such as one without the eos token of `before`), or has only blanks between the text `before` and the answer.
    """
    names = [name for name in THINKING_VARIABLES if name in template.reads]
    prompts: set[str] = set()
    end = common_prefix(before[::-1], after[::-1])
    begins = after.startswith(before) and not after[len(before) : after.find(_ANSWER)].strip()
    begins = begins and not before[len(before) - end :].strip()  # both end with a prompt that no option turns off
    for variables in ({}, *(dict.fromkeys(names, value) for value in (True, False) if names)):
        try:
            text = template.render(messages, None, add_generation_prompt=True, **variables)
        except RenderError:
            continue
        if not text.startswith(before):
            begins = begins or after.startswith(text)
        elif len(text) > len(before):
            prompts.add(text[len(before) :])
    return tuple(sorted(prompts, key=lambda prompt: (-len(prompt), prompt))), begins


def _needs_string_arguments(template: ChatTemplate, question: list[dict[str, Any]]) -> bool:
    """Return whether the template renders a tool call only if its arguments are a JSON string."""
    arguments = {"city": "Probe City"}

    def renders(value: object) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": value}}
        messages = [
            *question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "call00001", "name": "probe_tool"},
        ]
        try:
            return "Probe City" in template.render(messages, [_PROBE_TOOL])
        except RenderError:
            return False

    return not renders(arguments) and renders(json.dumps(arguments))


def _check_rows(options: ChatOptions, encoding: ChatEncoding, rows: Sequence[Row]) -> None:
    """Refuse a template that does not fit the first rows; rows that are bad themselves are rejected later.

    With `--on-bad-record quarantine`, the template must fit at least half of the rows that are not bad themselves.
    """
    cutter = RowCutter(encoding)
    bad: list[tuple[Row, BadRow]] = []
    misfits: list[tuple[Row, BadRow]] = []
    good = 0
    for row in rows:
        try:
            cutter.chunk_texts(row.value, columnar=row.columnar)
            good += 1
        except BadRow as error:
            misfit = error.code == NO_PROMPT or error.code.startswith(UNRENDERED)
            (misfits if misfit else bad).append((row, error))
    if misfits and (options.on_bad_record == "fail" or len(misfits) > good):
        row, problem = misfits[0]
        raise RequestError(f"{row.place}: {problem.reason}") from problem
    if bad and not good:
        row, problem = bad[0]
        raise RequestError(
            f"{row.place}: {problem.reason}. None of the first {len(rows):,} rows can be trained on; correct the rows, "
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
