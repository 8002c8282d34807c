"""Jinja for chat templates of unknown origin: text in, text out, and no Python objects.

A chat template comes with a tokenizer, so it is a program from the internet. `TemplateEnvironment` adds two rules to
Jinja's sandbox:

- A template reads the methods of text, lists and objects that change nothing, and no other attribute.
- `{{ }}` and `~` print text, numbers, lists and objects: the text of another Python object contains its address.

`stages.chat.limits` limits the time and the memory of a render.

The semantics are those of chat templates in transformers (utils/chat_template_utils.py): trim_blocks, lstrip_blocks,
loop controls, its `tojson`, and the tag `generation`.
"""

import json
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup


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


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template in one thread."""

    generation_start = ""
    generation_end = ""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self.finalize = self.text
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": raise_exception,
        }
        for name in ("random", "xmlattr", "urlize", "pprint", "wordwrap"):
            del self.filters[name]
        self.filters |= {"tojson": self._to_json, "~": self._concatenate}

    def prepare(self, tree: nodes.Template) -> nodes.Template:
        """Return the syntax tree of a template in which the operator `~` checks what it prints."""
        _Concatenations().visit(tree)
        tree.set_environment(self)
        return tree

    # -- text of values

    def text(self, value: Any) -> str:
        """Return the text of a value, as `{{ value }}` prints it; refuse a function, a generator and a namespace."""
        if type(value) is str:
            return value
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
        return str(value)

    def _concatenate(self, values: list[Any]) -> str:
        return self.concat([self.text(value) for value in values])

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

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an attribute at once; Jinja's sandbox would print it as an empty text."""
        raise SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}, which a chat template cannot read")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro or global function."""
        if isinstance(obj, (BuiltinMethodType, MethodType)):  # of `is_safe_attribute`
            kwargs.pop("_loop_vars", None)  # Jinja's compiler adds these two to calls inside blocks
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    # -- filters

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
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Concatenations(NodeTransformer):
    """Replace the operator `~` by a filter of the environment."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "~", [], [], None, None, lineno=node.lineno)
