"""Find the chat template at plan time, and check that it renders what will be trained.

The gate renders probes and the first rows. It fails with exit code 2 and both texts if a model could not learn from the
result: the answer's text or the token that ends it is not rendered, or a prompt is not a prefix of its conversation.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.core.files.user_path import local_path
from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import RequestError, TemplateLimit
from tokenmill.stages.chat.encode import ChatEncoder, ChatEncoding, Rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.rows import BadRow, Conversation, PromptAnswer, read_row
from tokenmill.stages.chat.template import BUILTIN, ChatTemplate, RenderError, builtin_source
from tokenmill.stages.chat.turns import NO_PROMPT, THINKING_VARIABLES, UNRENDERED, MessageForm, Stops
from tokenmill.stages.chat.untrained import common_prefix
from tokenmill.tokenize import sentencepiece_model
from tokenmill.tokenize.tokenizer_files import ADDITIONAL_TEMPLATES

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template can use as variables."""

MAX_TEMPLATE_BYTES = 256 << 10
"""Bytes of the largest accepted template; the largest known ones have some 20 kB."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of the templates that transformers chooses: for rows with tools, the second one if a tokenizer has it."""

_QUESTION, _ANSWER = "Question of the probe", "Answer of the probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_RESULT = {"role": "tool", "content": "done", "tool_call_id": "call00001", "name": "probe_tool"}
_EXCERPT = 400


class Row(NamedTuple):
    """One of the first rows of the input, with its file and its line there."""

    place: str
    value: JsonObject
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
        (name, source), *named = _find_templates(options.chat_template, tokenizer)
        rendering = _probe_with_rows(source, name, variables, tokens, ordinary, options, end, rows)
        for name, source in named:
            try:
                other = _probe_with_rows(source, name, variables, tokens, ordinary, options, end, rows, [_PROBE_TOOL])
            except TemplateLimit:
                raise
            except RequestError as error:
                if _have_tools(options, rows):
                    raise
                other = Rendering(source=None, name=str(error))  # a later row with tools is a bad record
            stops = tuple(sorted({*rendering.stop_ids, *other.stop_ids}))
            rendering = replace(rendering, stop_ids=stops, tool_use=other)
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


def _writes_blank(backend: JsonObject) -> bool:
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
    sources = list(_read_valid_rows(options, rows))
    return not sources or any(isinstance(source, Conversation) for source in sources)


def _have_tools(options: ChatOptions, rows: Sequence[Row]) -> bool:
    """Return whether a valid row has tools."""
    return any(isinstance(source, Conversation) and source.tools for source in _read_valid_rows(options, rows))


def _read_valid_rows(options: ChatOptions, rows: Sequence[Row]) -> Iterator[Conversation | PromptAnswer]:
    settings = options.encoding(Rendering(source=None)).rows
    for row in rows:
        with suppress(BadRow):
            yield read_row(row.value, settings, columnar=row.columnar)


def _read_special_tokens(
    tokenizer: Tokenizer, backend: JsonObject
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


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); use the files of one release of the tokenizer") from error
    return value if isinstance(value, dict) else {}


def _find_templates(choice: str, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the name and the source of the chosen template, and of another one for rows with tools."""
    if choice in BUILTIN:
        return [(f"the built-in template {choice}", builtin_source(choice))]
    if choice != "tokenizer":
        path = local_path(choice, "--chat-template")
        if not path.is_file():
            raise RequestError(
                f"invalid --chat-template {choice!r}: there is no such file, and no built-in template has this name; "
                f"choose tokenizer, a .jinja file, or one of {', '.join(BUILTIN)}"
            )
        return [(str(path), _read_text(path))]
    reference = tokenizer.reference
    templates = _read_templates(tokenizer.directory)
    if not templates:
        raise RequestError(
            f"the tokenizer {reference} has no chat template; pass --chat-template with a .jinja file or one of the "
            f"built-in templates {', '.join(BUILTIN)}"
        )
    if DEFAULT not in templates and len(templates) > 1:
        raise RequestError(
            f"the tokenizer {reference} has the chat templates {', '.join(templates)} and none with the name "
            f"{DEFAULT}; write the template that you want into a .jinja file, and pass it with --chat-template"
        )
    is_file = (tokenizer.directory / "chat_template.jinja").is_file()
    name = f"{reference}/chat_template.jinja" if is_file else f"the chat template of {reference}"
    chosen = [(name, templates.get(DEFAULT) or next(iter(templates.values())))]
    if TOOL_USE in templates and len(templates) > 1:
        chosen.append((f"the chat template {TOOL_USE} of {reference}", templates[TOOL_USE]))
    return chosen


def _read_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name, as transformers reads them.

    The files of templates have priority over tokenizer_config.json. chat_template.json is a file of processors, which
    AutoTokenizer does not read; its template is used if there is no other one.
    """
    paths = {DEFAULT: directory / "chat_template.jinja"} | {
        path.stem: path for path in sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    }
    templates = {name: _read_text(path) for name, path in paths.items() if path.is_file()}
    for name in () if templates else ("tokenizer_config.json", "chat_template.json"):
        value = _read_json(directory / name).get("chat_template")
        parts = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
        templates = {
            part["name"]: part["template"]
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("name"), str) and isinstance(part.get("template"), str)
        }
        templates = {key: source for key, source in templates.items() if source.strip()}
        if any(len(source) > MAX_TEMPLATE_BYTES for source in templates.values()):
            raise RequestError(
                f"a chat template in {name} of the tokenizer has more than {MAX_TEMPLATE_BYTES:,} characters, the "
                "limit for a chat template; pass another one with --chat-template"
            )
        if templates:
            break
    return templates


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


def _probe_with_rows(
    source: str,
    name: str,
    variables: dict[str, str],
    tokens: dict[str, int],
    ordinary: dict[str, int],
    options: ChatOptions,
    end: str,
    rows: Sequence[Row],
    tools: list[Any] | None = None,
) -> Rendering:
    """Return the result of the probe, with the `chat_template_kwargs` of a row if the template requires them."""
    first: RequestError | None = None
    for own in ({}, *_find_variables(options, rows)):
        try:
            template = ChatTemplate(source, name=name, variables={**variables, **own}, date=options.date)
            return replace(_probe(template, name, tokens, ordinary, options, end, tools), variables=variables)
        except TemplateLimit:
            raise
        except RequestError as error:
            first = first or error
    assert first is not None  # noqa: S101
    raise first


def _find_variables(options: ChatOptions, rows: Sequence[Row]) -> list[JsonObject]:
    """Return the different `chat_template_kwargs` of the rows."""
    variables: list[JsonObject] = []
    for source in _read_valid_rows(options, rows):
        if not isinstance(source, PromptAnswer) and source.variables and source.variables not in variables:
            variables.append(source.variables)
    return variables


def _probe(
    template: ChatTemplate,
    name: str,
    tokens: dict[str, int],
    ordinary: dict[str, int],
    options: ChatOptions,
    end: str,
    tools: list[Any] | None = None,
) -> Rendering:
    """Return what the template does with a short conversation; refuse one that a model cannot learn from."""
    answer = {"role": "assistant", "content": _ANSWER}
    question, before, after, lists = _render_probe(template, name, answer, tools)
    form = MessageForm(content_lists=lists)
    prompts, begins = _find_prompts(template, form.write(question), before, after, tools)
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
    next_stops = Stops()
    if not stops:
        next_stops = _find_next_stops(
            template, name, form, [*question, answer], after, tokens | ordinary, options, tools
        )
        stops = [stop for stop in next_stops if stop]
    if template.has_generation_tags and options.train != "all":
        if not (options.train_reasoning and options.train_tool_calls):
            raise RequestError(
                f"{name} marks the trained text with generation blocks, so --no-train-reasoning and "
                "--no-train-tool-calls cannot leave out a part of it; remove these options, or choose a template "
                "without these blocks"
            )
        text, spans = template.render_tagged(form.write([*question, answer]), tools)
        trained = "".join(text[begin:stop] for begin, stop in spans)
        trained += next_stops.user if spans and spans[-1][1] == len(text) else ""
        if not any(token in trained for token in stops) or _ANSWER not in trained:
            raise RequestError(
                f"{name}: its generation blocks contain {trained!a}, but the answer is {_ANSWER + tail!a}, so its stop "
                f"token {stops[0]!a} would not be trained; move the end of the block behind the stop token"
            )
    return Rendering(
        source=template.source,
        name=Path(name).name if name == options.chat_template else name,  # a plan does not depend on directories
        date=options.date,
        prompts=prompts,
        form=_find_form(template, form, question),
        stops=next_stops,
        stop_ids=_ids(tokens | ordinary, [*stops, end]),
        special_tokens=tuple(tokens),
        end=end,
    )


def _ids(tokens: dict[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({tokens[name] for name in names if name in tokens}))


def _render_probe(
    template: ChatTemplate, name: str, answer: JsonObject, tools: list[Any] | None
) -> tuple[list[JsonObject], str, str, bool]:
    """Return a question, with a system message if the template requires one, and its texts without and with answer.

    The last value is whether the template reads only contents that are lists of parts.
    """
    question, system = {"role": "user", "content": _QUESTION}, {"role": "system", "content": "System of the probe"}
    first: RenderError | None = None
    plain: tuple[list[JsonObject], str, str, bool] | None = None
    for lists in (False, True):
        form = MessageForm(content_lists=lists)
        for messages in ([question], [system, question]):
            try:
                before = template.render(form.write(messages), tools)
                after = template.render(form.write([*messages, answer]), tools)
            except RenderError as error:
                first = first or error
                continue
            if _ANSWER in after and _QUESTION in after:
                return messages, before, after, lists
            plain = plain or (messages, before, after, lists)
    if plain is not None:
        return plain
    assert first is not None  # noqa: S101
    remedy = "pass --date" if "strftime_now" in first.reason else "correct the template"
    raise RequestError(
        f"{_place(name, first)}: it cannot render a question and an answer ({first.reason}); {remedy}"
    ) from first


def _find_next_stops(
    template: ChatTemplate,
    name: str,
    form: MessageForm,
    messages: list[JsonObject],
    after: str,
    tokens: dict[str, int],
    options: ChatOptions,
    tools: list[Any] | None,
) -> Stops:
    """Return the tokens that --stop-tokens names, which begin the message behind an answer; `after` ends with it."""
    named = [token for token in (options.stop_tokens or "").split(",") if token]
    unknown = [token for token in named if token not in tokens]
    if unknown:
        raise RequestError(
            f"invalid --stop-tokens: {unknown[0]!r} is not a token of the tokenizer; pass the tokens with which the "
            "chat template begins the next message"
        )

    def find(earlier: list[JsonObject], text: str, following: JsonObject, tools: list[Any] | None) -> str:
        try:
            whole = template.render(form.write([*earlier, following]), tools)
        except RenderError:
            return ""
        rest = whole[len(text) :].lstrip() if whole.startswith(text) else ""
        return max((token for token in tokens if token and rest.startswith(token)), key=len, default="")

    user = find(messages, after, {"role": "user", "content": _QUESTION}, tools)
    tool, form = "", _find_form(template, form, messages[:-1])
    called = [*messages[:-1], _make_call("", {"city": "Probe City"})]
    try:
        text = template.render(form.write(called), [_PROBE_TOOL])
        tool = find(called, text, _RESULT, [_PROBE_TOOL])
    except RenderError:
        pass
    if user in named and user:
        return Stops(user, tool if tool in named else user)
    tail = after[after.rindex(_ANSWER) + len(_ANSWER) :]
    begins = [token for token in dict.fromkeys((user, tool)) if token]
    remedy = (
        f"if the model stops at the token that begins the next message, pass --stop-tokens '{','.join(begins)}'"
        if begins
        else "choose a template that fits the tokenizer"
    )
    raise RequestError(
        f"{name} ends an answer with {tail!a}, which contains no special token of the tokenizer, so a model would "
        f"never learn to stop: the probe is {_excerpt(after)}; {remedy}"
    )


def _find_prompts(
    template: ChatTemplate, messages: list[JsonObject], before: str, after: str, tools: list[Any] | None
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
            text = template.render(messages, tools, add_generation_prompt=True, **variables)
        except RenderError:
            continue
        if not text.startswith(before):
            begins = begins or after.startswith(text)
        elif len(text) > len(before):
            prompts.add(text[len(before) :])
    return tuple(sorted(prompts, key=lambda prompt: (-len(prompt), prompt))), begins


def _make_call(content: str | None, arguments: JsonObject) -> JsonObject:
    """Return an answer with a tool call."""
    call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _find_form(template: ChatTemplate, form: MessageForm, question: list[JsonObject]) -> MessageForm:
    """Return the form in which the template renders a tool call."""

    def render(own: MessageForm, content: str | None) -> str:
        messages = [*question, _make_call(content, {"city": "Probe City"}), _RESULT]
        try:
            text = template.render(own.write(messages), [_PROBE_TOOL])
        except RenderError:
            return ""
        return text if "Probe City" in text else ""

    strings, nulls = replace(form, string_arguments=True), replace(form, null_content=True)
    both = replace(strings, null_content=True)
    plain = next((own for own in (form, nulls, strings, both) if render(own, None)), form)
    with_null = replace(plain, null_content=True)
    empty, null = render(replace(plain, null_content=False), None), render(with_null, None)
    return with_null if null and null != empty and null.count("None") <= empty.count("None") else plain


def _check_rows(options: ChatOptions, encoding: ChatEncoding, rows: Sequence[Row]) -> None:
    """Refuse a template that does not fit the first rows; rows that are bad themselves are rejected later.

    With `--on-bad-record quarantine`, the template must fit one of the rows that are not bad themselves.
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
    if misfits and (options.on_bad_record == "fail" or not good):
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
