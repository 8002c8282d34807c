"""Jinja for chat templates of unknown origin: no Python objects, no endless render, no unlimited memory.

A chat template comes with a tokenizer, so it is a program from the internet. `TemplateEnvironment` changes Jinja's
sandbox in three ways:

- A template reads the methods of text, lists and objects that change nothing, and no other attribute. It prints text,
  numbers, lists and objects, and no other value.
- A render has a number of steps: loop iterations, calls, filters. The number is the same on every machine, so a row is
  accepted everywhere or nowhere. The CPU time of the thread is a second limit, for templates whose steps are slow.
- A value has a maximum size, and a render has a maximum of characters that it makes. Every operation whose result is
  longer than its operands counts them: `limit_nodes` replaces these operations in the syntax tree.

The semantics are those of chat templates in transformers (utils/chat_template_utils.py): trim_blocks, lstrip_blocks,
loop controls, its `tojson`, and the tag `generation`.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_environment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

MAX_STEPS = 2_000_000
"""Loop iterations, calls and filters of one render: about one second, a thousand times a usual render."""
MACRO_STEPS = 10
"""Steps of a call of a macro or a global function, which takes longer than another step."""
MAX_CPU_SECONDS = 5.0
"""CPU time of one render: a second limit, above the time of `MAX_STEPS` usual steps even on a slow machine."""
MAX_CHARACTERS = 64 << 20
"""Characters of one value, and of the rendered text."""
MAX_ITEMS = 1 << 20
"""Items of one value, with those of the lists and objects inside it."""
MAX_TOTAL = 256 << 20
"""Characters that one render makes, with those that a list or object takes itself."""
ITEM_COST = 64
"""Characters that an item of a new object, or of a split text, counts; an item of another list counts 8."""
MAX_WIDTH = 10_000
"""The largest width, precision or number of blanks of a formatted value."""

_STEPS_PER_LOOK = 64
"""Steps between two looks at the CPU time."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TEXT_METHODS = _words(
    "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title "
    "upper zfill"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    Markup: _TEXT_METHODS,
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
    LoopContext: _words(
        "index index0 revindex revindex0 first last length depth depth0 previtem nextitem cycle changed"
    ),
    Cycler: frozenset(("current", "next", "reset")),
    Macro: frozenset(("name", "arguments")),
}
"""The attributes that a template may read, by the type of the value; `Namespace` and groups are separate."""

_DICT_NAMES = frozenset(dir(dict))
"""Names that mean a method when a template reads them from an object, even if the object has a key of that name."""

_PRINTED = (str, int, float, type(None), Undefined, range)
_DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))

_encode_json = json.JSONEncoder(ensure_ascii=False).encode


class RenderLimit(Exception):
    """A render exceeded a limit; the text names the limit."""


def raise_exception(message: object) -> None:
    """End a render, for templates that refuse a conversation."""
    raise TemplateError(f"the template raised an exception: {message}")


class GenerationTag(Extension):
    """Compile `{% generation %} ... {% endgeneration %}`, which encloses the text of an answer.

    The text inside is output between two marks, which are empty unless the environment collects spans. The body has a
    scope of its own, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes of one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (
            nodes.Output([nodes.EnvironmentAttribute(name)]).set_lineno(line)
            for name in ("generation_start", "generation_end")
        )
        return [first, nodes.Scope(body).set_lineno(line), last]


class _Formatter(SandboxedFormatter):
    """`str.format` without wide fields and without the texts of Python objects."""

    def __init__(self, environment: "TemplateEnvironment") -> None:
        super().__init__(environment)
        self._limits = environment

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_format(format_spec)
        self._limits.check_printed(value)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._limits.check_printed(value)
        return super().convert_field(value, conversion)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template in one thread; `begin` starts the limits of a render."""

    intercepted_binops = frozenset(("*", "**", "%"))

    generation_start = ""
    generation_end = ""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self.begin()
        self.finalize = self.text
        self.globals = {
            "range": self.globals["range"],
            "dict": self._make_dict,
            "namespace": Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": raise_exception,
        }
        for name in ("random", "xmlattr", "urlize", "pprint", "wordwrap"):
            del self.filters[name]
        self.filters |= {"join": _join, "sum": _sum, "trim": self._trim, "tojson": self._to_json}
        for name, function in self.filters.items():
            if name not in _CHEAP_FILTERS:
                self.filters[name] = self._limit_filter(name, function)
        for name in _SLOW_TESTS:
            self.tests[name] = self._limit_test(cast("Callable[..., bool]", self.tests[name]))
        self.filters |= {"+": self.add, "~": self._concatenate, "[]": self.weigh, "[:]": self._slice}

    def begin(self) -> None:
        """Start the limits of a render."""
        self._steps = MAX_STEPS
        self._next_look = MAX_STEPS - _STEPS_PER_LOOK
        self._room = MAX_TOTAL
        self._deadline = time.thread_time() + MAX_CPU_SECONDS

    def prepare(self, tree: nodes.Template) -> nodes.Template:
        """Return the syntax tree of a template with the limits."""
        return limit_nodes(tree, self)

    # -- limits

    @property
    def step(self) -> bool:
        """Count one step and return True; raise RenderLimit after the last one."""
        self._steps -= 1
        if self._steps < self._next_look:
            if self._steps <= 0:
                raise RenderLimit(f"it took more than {MAX_STEPS:,} loop iterations, calls and filters")
            if time.thread_time() > self._deadline:
                raise RenderLimit(f"it took more than {MAX_CPU_SECONDS:g} seconds of CPU time")
            self._next_look = max(self._steps - _STEPS_PER_LOOK, 0)
        return True

    def spend(self, characters: int) -> None:
        """Count the characters of a value; raise RenderLimit when the value or all values together are too long."""
        if characters > MAX_CHARACTERS:
            raise RenderLimit(f"it made a value of more than {MAX_CHARACTERS:,} characters")
        self._room -= characters
        if self._room < 0:
            raise RenderLimit(f"it made more than {MAX_TOTAL:,} characters in all")

    def weigh(self, value: Any) -> Any:
        """Check the size of a list or object with everything inside it, count its own items, and return it."""
        items = characters = 0
        stack = [value]
        while stack:
            item = stack.pop()
            items += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, (list, tuple, set)):
                stack += item
            if items + len(stack) > MAX_ITEMS:
                raise RenderLimit(f"it made a value of more than {MAX_ITEMS:,} items")
        if characters > MAX_CHARACTERS:
            raise RenderLimit(f"it made a value of more than {MAX_CHARACTERS:,} characters")
        self.spend(len(value) * (ITEM_COST if isinstance(value, dict) else 8))
        return value

    def bound(self, value: Any) -> Any:
        """Count a new value of any type, and return it."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, dict, tuple, set)):
            self.weigh(value)
        return value

    def concat(self, chunks: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        chunks = chunks if isinstance(chunks, list) else list(chunks)
        self.spend(sum(map(len, chunks)))
        return "".join(chunks)

    # -- text of values

    def check_printed(self, value: Any) -> None:
        """Refuse to print anything but text, numbers, lists and objects: a function, a generator, a namespace."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, dict):
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, (list, tuple, set)) or type(item) in _DICT_VIEWS:
                stack += list(item)
            elif not isinstance(item, _PRINTED):
                raise SecurityError(
                    f"it prints a {type(item).__name__}, which is not text, a number, a list or an object"
                )

    def text(self, value: Any) -> str:
        """Return the text of a value, as `{{ value }}` prints it."""
        if type(value) is str:
            return value
        self.check_printed(value)
        text = str(value)
        self.spend(len(text))
        return text

    # -- operators

    def add(self, left: Any, right: Any) -> Any:
        """Return `left + right`."""
        value = left + right
        if type(value) is str:
            self.spend(len(value))
        elif isinstance(value, (list, tuple)):
            self.weigh(value)
        return self.bound(value) if isinstance(value, Markup) else value

    def _concatenate(self, values: list[Any]) -> str:
        return self.concat([self.text(value) for value in values])

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]
        if isinstance(part, (str, list, tuple)):
            self.spend(len(part))
        return part

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `*`, `**` or `%`, which a template can use to make large values."""
        del context
        self.step  # noqa: B018
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    self.spend(len(value) * max(times, 0))
            return self._check_number(self.bound(left * right))
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and right > 0 and left.bit_length() * right > MAX_WIDTH:
                raise RenderLimit(f"it made a number of more than {MAX_WIDTH:,} bits")
            return left**right
        if isinstance(left, str):
            _check_format(left)
            self.check_printed(right)
            return self.bound(left % right)
        return left % right

    @staticmethod
    def _check_number(value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > MAX_WIDTH:
            raise RenderLimit(f"it made a number of more than {MAX_WIDTH:,} bits")
        return value

    # -- attributes and calls

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute: a method that changes nothing, or a field of a loop."""
        del value
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:
            return True
        allowed = _METHODS.get(type(obj))
        if allowed is None:
            return isinstance(obj, tuple) and attr in ("grouper", "list")
        return attr in allowed

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`: of an object, the value of its key unless a method has that name."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`, or the attribute of that name."""
        if type(obj) is dict and type(argument) is str and argument not in _DICT_NAMES:
            try:
                return obj[argument]
            except KeyError:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` and `str.format_map` with limits, and None for any other value."""
        if (
            not isinstance(value, BuiltinMethodType)
            or value.__name__ not in ("format", "format_map")
            or not isinstance(value.__self__, str)
        ):
            return None
        template, by_map = str(value.__self__), value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            if by_map:
                (mapping,) = args
                return _Formatter(self).vformat(template, (), mapping)
            return _Formatter(self).vformat(template, args, kwargs)

        return format_text

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an attribute at once; Jinja's sandbox would print it as an empty text."""
        raise SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}, which a chat template cannot read")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro or global function, and count its result."""
        self.step  # noqa: B018
        if isinstance(obj, (BuiltinMethodType, MethodType)):
            kwargs.pop("_loop_vars", None)  # Jinja's compiler adds these two to calls inside blocks
            kwargs.pop("_block_vars", None)
            if isinstance(obj.__self__, str):
                return self._call_text_method(obj, obj.__self__, *args, **kwargs)
            value = obj(*args, **kwargs)
        else:
            if obj is Namespace or (type(obj) is Macro and (obj.catch_varargs or obj.catch_kwargs)):
                self.weigh((*args, kwargs))
            self._steps -= MACRO_STEPS - 1
            value = super().call(context, obj, *args, **kwargs)
        if isinstance(value, (str, list, tuple)):
            self.spend(len(value))
        elif isinstance(value, dict):
            self.spend(len(value) * ITEM_COST)
        return value

    def _call_text_method(self, method: Any, text: str, /, *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        if name == "join" and len(args) == 1:
            _check_items(self, args[0])
            args = (list(args[0]),)
            self.spend(len(text) * len(args[0]) + sum(len(item) for item in args[0] if isinstance(item, str)))
        elif (check := _METHOD_CHECKS.get(name)) is not None:
            check(self, text, *args, **kwargs)
        value = method(*args, **kwargs)
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple)):
            self.spend(len(value) * ITEM_COST)
        return value

    # -- globals and filters

    def _make_dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return self.weigh(dict(*args, **kwargs))  # type: ignore[no-any-return]

    def _trim(self, value: Any, chars: str | None = None) -> str:
        return (value if isinstance(value, str) else self.text(value)).strip(chars)

    @staticmethod
    def _to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Return the JSON of a value, with the parameters of transformers' filter."""
        if not (ensure_ascii or sort_keys or indent is not None or separators is not None):
            return _encode_json(value)
        for text in (indent, *(separators or ())):
            if (len(text) if isinstance(text, str) else text or 0) > 64:
                raise RenderLimit("it indents or separates JSON by more than 64 characters")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _limit_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = _FILTER_CHECKS.get(name)
        is_text = name in _TEXT_FILTERS
        pass_arg = getattr(function, "jinja_pass_arg", None)
        skip = int(pass_arg is not None)

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.step  # noqa: B018
            if is_text and len(args) > skip and not isinstance(args[skip], str):
                args = (*args[:skip], self.text(args[skip]), *args[skip + 1 :])
            if check is not None:
                check(self, *args[skip:], **kwargs)
            return self.bound(function(*args, **kwargs))

        if pass_arg is not None:
            limited.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return limited

    def _limit_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.step  # noqa: B018
            return function(*args, **kwargs)

        return limited


@pass_environment
def _join(environment: TemplateEnvironment, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Join the texts of items, as Jinja's filter without autoescaping."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    texts = [environment.text(item) for item in value]
    separator = environment.text(d)
    environment.spend(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@pass_environment
def _sum(environment: TemplateEnvironment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Add items, as Jinja's filter, with a limit for sums of lists."""
    if isinstance(start, str):
        raise TypeError("sum cannot add texts; use join")
    for item in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
        environment.step  # noqa: B018
        start = environment.add(start, item)
    return start


_NUMBER = re.compile(r"\d{5,}")


def _check_format(text: str) -> None:
    """Refuse a format with a width that is long or that comes from a value."""
    if "*" in text and re.search(r"%[^a-zA-Z%]*\*", text):
        raise RenderLimit("it formats a value with a width from a variable")
    for number in _NUMBER.findall(text):
        if int(number[:9]) > MAX_WIDTH:
            raise RenderLimit(f"it formats a value with a width of more than {MAX_WIDTH:,}")


def _check_width(environment: TemplateEnvironment, text: Any, width: Any = 0, *_: Any, **options: Any) -> None:
    del environment, text
    for value in (width, *options.values()):
        if (len(value) if isinstance(value, str) else value if isinstance(value, int) else 0) > MAX_WIDTH:
            raise RenderLimit(f"it makes text with a width of more than {MAX_WIDTH:,}")


def _check_tabs(environment: TemplateEnvironment, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        environment.spend(len(text) + text.count("\t") * max(tabsize, 0))


def _check_indent(environment: TemplateEnvironment, text: str, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    environment.spend(len(text) + (len(text.splitlines()) + 2) * max(size, 0))


def _check_replace(
    environment: TemplateEnvironment, text: str, old: Any = "", new: Any = "", *_: Any, **__: Any
) -> None:
    old, new = str(old), str(new)
    growth = len(new) - len(old)
    if growth > 0:
        environment.spend(len(text) + text.count(old) * growth)


def _check_split(environment: TemplateEnvironment, text: str, sep: Any = None, *_: Any, **__: Any) -> None:
    del environment
    if len(text) > MAX_ITEMS and (not isinstance(sep, str) or not sep or text.count(sep) >= MAX_ITEMS):
        raise RenderLimit(f"it splits text into more than {MAX_ITEMS:,} items")


def _check_lines(environment: TemplateEnvironment, text: str, *_: Any, **__: Any) -> None:
    del environment
    if len(text) > MAX_ITEMS and sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) >= MAX_ITEMS:
        raise RenderLimit(f"it splits text into more than {MAX_ITEMS:,} lines")


def _check_items(environment: TemplateEnvironment, value: Any = (), *_: Any, **__: Any) -> None:
    """Refuse to make a list of the characters of a long text."""
    del environment
    if isinstance(value, str) and len(value) > MAX_ITEMS:
        raise RenderLimit(f"it makes a list of the characters of a text of more than {MAX_ITEMS:,}")


def _check_count(environment: TemplateEnvironment, value: Any, count: Any = 0, *_: Any, **options: Any) -> None:
    _check_items(environment, value)
    for number in (count, *options.values()):
        if isinstance(number, int) and number > MAX_WIDTH:
            raise RenderLimit(f"it divides a list into more than {MAX_WIDTH:,} parts")


def _check_precision(environment: TemplateEnvironment, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    del environment, value
    if isinstance(precision, int) and abs(precision) > 400:
        raise RenderLimit("it rounds to more than 400 digits")


def _check_format_filter(environment: TemplateEnvironment, text: str, *args: Any, **kwargs: Any) -> None:
    _check_format(text)
    environment.check_printed((args, kwargs))


_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": _check_lines,
}
"""Checks of the methods of text whose result can be much larger than the text."""

_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "indent": _check_indent,
    "replace": _check_replace,
    "format": _check_format_filter,
    "truncate": _check_width,
    "round": _check_precision,
    "batch": _check_count,
    "slice": _check_count,
    **dict.fromkeys(("list", "sort", "unique", "groupby", "map", "select", "reject", "selectattr"), _check_items),
    **dict.fromkeys(("rejectattr", "dictsort", "min", "max", "sum", "join"), _check_items),
}
"""Checks of the filters whose result can be much larger than their operands."""

_TEXT_FILTERS = _words(
    "capitalize center e escape forceescape format indent lower upper replace safe string striptags title truncate "
    "wordcount"
)
"""Filters that convert their value to text."""

_CHEAP_FILTERS = frozenset(("count", "d", "default", "length", "trim"))
"""Filters that make no value larger than their operands and take no time of their own."""

_SLOW_TESTS = _words("eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in lower upper")
"""Tests whose time depends on the size of their operands."""


class _LimitedNodes(NodeTransformer):
    """Insert the limits into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step")).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("step"), node.test)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """A sum with a constant grows too slowly to be counted: the steps limit it."""
        self.generic_visit(node)
        if isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const):
            return node
        return _filter(node.left, "+", [node.right])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "~", [])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if any(isinstance(operand, nodes.Const) for operand in (node.expr, *(op.expr for op in node.ops))):
            return node
        return nodes.And(nodes.EnvironmentAttribute("step"), node, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "[:]", [bound or nodes.Const(None) for bound in bounds])

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _are_constants(node.items) else _filter(node, "[]", [])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _are_constants(node.items) else _filter(node, "[]", [])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if _are_constants(pair.value for pair in node.items) else _filter(node, "[]", [])


def _are_constants(items: Iterable[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _filter(node: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)


def limit_nodes(tree: nodes.Template, environment: TemplateEnvironment) -> nodes.Template:
    """Return the syntax tree of a template with the limits in its loops, operators and literals."""
    _LimitedNodes().visit(tree)
    stack: list[nodes.Node] = [tree]
    while stack:  # an inserted node has the line of the node around it
        node = stack.pop()
        for child in node.iter_child_nodes():
            if child.lineno is None:
                child.lineno = node.lineno
            stack.append(child)
    tree.set_environment(environment)
    return tree
