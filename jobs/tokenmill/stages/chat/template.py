"""A chat template: Jinja that renders messages as the text that a model reads.

A template comes from a tokenizer, from a file or from `BUILTIN`. `sandbox` has what it can read and print, `limits` its
time and memory. The failure of a render is a RenderError, which rejects one conversation. A template that can never
render, or that exceeds a limit, is a RequestError.
"""

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import RequestError
from tokenmill.stages.chat.limits import (
    GROWTH_PER_CHARACTER,
    MAX_CHARACTERS,
    MAX_EXPANSION,
    MAX_GROWTH,
    TEMPLATE_REMEDY,
    limited,
    measure,
    memory_error,
)

if TYPE_CHECKING:
    from jinja2 import nodes

    from tokenmill.stages.chat.sandbox import TemplateEnvironment

BUILTIN = ("chatml", "llama3", "nano3")
"""The names of the templates in `templates/`."""

_REASONING_ALIASES = frozenset(("thinking", "reasoning"))
"""Keys of a message under which some templates read the reasoning."""


class RenderError(Exception):
    """A template cannot render a conversation.

    `reason` is one clause without a final period; `line` is the line of the template, if it is known.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"{reason} (line {line} of the template)")
        self.reason = reason
        self.line = line


def builtin_source(name: str) -> str:
    """Return the text of a template in `BUILTIN`; raise RequestError for another name."""
    if name not in BUILTIN:
        raise RequestError(
            f"unknown chat template {name!r}: the built-in ones are {', '.join(BUILTIN)}; choose one of them"
        )
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


class ChatTemplate:
    """A compiled chat template; threads can share it.

    Attributes:
        name: the name for messages, such as the path of a file.
        source: the text of the template.
        reads: names of the variables that it reads and does not set, including `strftime_now` if it reads that.
        has_generation_tags: whether it has `{% generation %}` blocks.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, object] = MappingProxyType({}),
        date: str | None = None,
    ) -> None:
        """Compile a template.

        `variables` are the same in each render, for example `bos_token`. `date` (YYYY-MM-DD) is the day of
        `strftime_now`, which is undefined without it: the current time would make each run write other tokens.

        RequestError names the line of a syntax error or of a refused construct.
        """
        self.source = source
        self.name = name
        self._variables = dict(variables)
        self._date = date
        self._local = threading.local()
        program = self._local.program = Program(self)
        analysis = program.analysis
        self.reads = analysis.reads
        self.has_generation_tags = analysis.generation
        self._aliases = analysis.aliases

    @property
    def parameters(self) -> JsonObject:
        """The keyword arguments of this template besides its name."""
        return {"variables": self._variables, "date": self._date}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the source, not the compiled code."""
        return _restore, (self.source, self.name, self._variables, self._date)

    def render(
        self,
        messages: list[JsonObject],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation; raise RenderError when the template refuses it."""
        return self._program.render(
            self._add_aliases(messages), tools, {**variables, "add_generation_prompt": add_generation_prompt}
        )

    def render_tagged(
        self, messages: list[JsonObject], tools: list[Any] | None = None, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the start and end characters of each `{% generation %}` block that is not empty."""
        variables.setdefault("add_generation_prompt", False)
        return self._program.render_tagged(self._add_aliases(messages), tools, variables)

    @property
    def _program(self) -> "Program":
        try:
            return self._local.program  # type: ignore[no-any-return]
        except AttributeError:
            program = self._local.program = Program(self)
            return program

    def _add_aliases(self, messages: list[JsonObject]) -> list[JsonObject]:
        if not self._aliases or not any("reasoning_content" in message for message in messages):
            return messages
        return [
            {**dict.fromkeys(self._aliases, message["reasoning_content"]), **message}
            if "reasoning_content" in message
            else message
            for message in messages
        ]


def _restore(source: str, name: str, variables: dict[str, object], date: str | None) -> ChatTemplate:
    return ChatTemplate(source, name=name, variables=variables, date=date)


class Program:
    """The code of a template for one thread."""

    def __init__(self, template: ChatTemplate, environment: "TemplateEnvironment | None" = None) -> None:
        """Compile the template; RequestError as `ChatTemplate`."""
        from jinja2 import TemplateError

        from tokenmill.stages.chat.sandbox import TemplateEnvironment

        self._environment = environment = environment or TemplateEnvironment()
        self._name = where = template.name
        try:
            with limited():
                tree = environment.parse(template.source)
                self.analysis = _Analysis(tree, environment, where)
                code = environment.compile(environment.prepare(tree))
            self._template = environment.template_class.from_code(environment, code, environment.globals)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise RequestError(
                f"{where}{f', line {line}' if line else ''}: {str(error.message).rstrip('.')}; {TEMPLATE_REMEDY}"
            ) from error
        except RecursionError as error:
            raise RequestError(
                f"{where}: its blocks or expressions are nested too deeply; {TEMPLATE_REMEDY}"
            ) from error
        except MemoryError:  # also of Python's parser
            raise RequestError(
                f"{where}: Python cannot compile the template within {MAX_GROWTH >> 20} MiB of memory, or its "
                f"expressions are nested too deeply; {TEMPLATE_REMEDY}"
            ) from None
        except (SyntaxError, ValueError) as error:  # such as more than 20 loops inside each other
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise RequestError(f"{where}: Python cannot compile the template ({reason}); {TEMPLATE_REMEDY}") from error
        clock = {} if template._date is None else {"strftime_now": _make_clock(template._date)}
        self._fixed = {**environment.globals, **clock, "documents": None, **template._variables}

    def render(self, messages: list[JsonObject], tools: list[Any] | None, variables: JsonObject) -> str:
        values = {**self._fixed, **variables, "messages": messages, "tools": tools}
        try:
            text = self._run(values)
        except MemoryError:
            text = self._run_again(values)
        if len(text) > MAX_CHARACTERS and len(text) > MAX_CHARACTERS + MAX_EXPANSION * measure(values):
            raise RenderError(
                f"it writes {len(text):,} characters, more than {MAX_CHARACTERS:,} and {MAX_EXPANSION} times the "
                "conversation"
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RenderError("it writes a lone surrogate, which is not a character") from None
        return text

    def _run(self, values: JsonObject, growth: int = 0) -> str:
        from jinja2.runtime import Context

        environment = self._environment
        try:
            with limited(messages=len(values["messages"]), tools=len(values["tools"] or ()), growth=growth):
                context = Context(environment, values, None, self._template.blocks)
                return environment.concat(self._template.root_render_func(context))
        except MemoryError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    def _run_again(self, values: JsonObject) -> str:
        """Render a conversation that may be large with more memory; raise TemplateLimit if this is too little, too."""
        try:
            return self._run(values, GROWTH_PER_CHARACTER * measure(values))
        except MemoryError:
            raise memory_error(self._name) from None

    def render_tagged(
        self, messages: list[JsonObject], tools: list[Any] | None, variables: JsonObject
    ) -> tuple[str, list[tuple[int, int]]]:
        environment = self._environment
        nonce = os.urandom(16).hex()
        start, end = f"\0<{nonce}\0", f"\0>{nonce}\0"
        environment.generation_start, environment.generation_end = start, end
        try:
            marked = self.render(messages, tools, variables)
        finally:
            environment.generation_start = environment.generation_end = ""
        pieces, spans = [], []
        position = depth = opened = 0
        for piece in re.split(f"({start}|{end})", marked):
            if piece == start:
                opened = opened if depth else position
                depth += 1
            elif piece == end:
                depth -= 1
                if not depth and position > opened:
                    spans.append((opened, position))
            else:
                pieces.append(piece)
                position += len(piece)
            if depth < 0:
                break
        text = "".join(pieces)
        if depth or (self.analysis.nested_generation and text != self.render(messages, tools, variables)):
            raise RenderError("a generation block does not reach the output as one piece, so its text is unknown")
        return text, spans

    def _explain(self, error: Exception) -> RenderError:
        """Return the failure of a render with the line of the template that caused it."""
        line = None
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_globals.get("__jinja_template__") is self._template:
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return RenderError(_describe(error), line)


def _describe(error: Exception) -> str:
    from jinja2 import TemplateError

    if isinstance(error, RecursionError):
        return "it calls itself too often, or a value is nested too deeply"
    text = " ".join(str(error)[:2000].split())[:500]
    if isinstance(error, TemplateError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


def _make_clock(date: str) -> Any:
    """Return `strftime_now` for a fixed day, at midnight."""
    from datetime import datetime

    try:
        moment = datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise RequestError(f"invalid date {date!r}: it must be a day as YYYY-MM-DD; correct it") from error

    def strftime_now(format: str) -> str:
        if re.search(r"%[^%a-zA-Z]*\d", format):
            raise ValueError("the format of strftime_now has a width")
        return moment.strftime(format)

    return strftime_now


class _Analysis:
    """The facts about a template that its syntax tree shows; a refused construct raises RequestError."""

    def __init__(self, tree: "nodes.Template", environment: "TemplateEnvironment", where: str) -> None:
        from jinja2 import meta, nodes

        refused = {
            nodes.Import: "import",
            nodes.FromImport: "import",
            nodes.Include: "include",
            nodes.Extends: "extends",
            nodes.EvalContextModifier: "autoescape",
        }
        for node in tree.find_all((*refused, nodes.Getattr, nodes.Getitem, nodes.NSRef)):
            name = next((text for kind, text in refused.items() if isinstance(node, kind)), None)
            if name is not None:
                raise RequestError(
                    f"{where}, line {node.lineno}: a chat template cannot have {{% {name} %}}; remove it, or copy the "
                    "text of the other template into this one"
                )
            attribute = _find_attribute(node)
            if attribute.startswith("_"):
                raise RequestError(
                    f"{where}, line {node.lineno}: a chat template cannot read {attribute!r}, because names that "
                    f"start with '_' lead to Python objects; {TEMPLATE_REMEDY}"
                )
        self.reads = frozenset(meta.find_undeclared_variables(tree))
        generation = [node for node in tree.find_all(nodes.EnvironmentAttribute) if node.name == "generation_start"]
        self.generation = bool(generation)
        captures = (nodes.Macro, nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock)
        self.nested_generation = any(
            any(inner.name == "generation_start" for inner in block.find_all(nodes.EnvironmentAttribute))
            for block in tree.find_all(captures)
        )
        names = {_find_attribute(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem))}
        self.aliases = names & _REASONING_ALIASES


def _find_attribute(node: "nodes.Node") -> str:
    """Return the constant name that a node reads or sets, or an empty text."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getitem):
        return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else ""
    return str(getattr(node, "attr", ""))
