"""Render a template with contents that record how the template uses them, for the forms of `stages.chat.forms`.

A form is right for other contents only if the template makes the same decisions for them. Therefore a TracedTemplate
renders contents of a class of their own. A template may print such a content, add text to it, strip its blanks, and
search it for a constant text. A constant is recorded, because a form is wrong for a content that contains it. Every
other use (a length, a slice, a loop, a filter, a comparison with another content) sets `refused`.

The contents must not be empty, and must not begin or end with white space.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from tokenmill.core.typed_json import JsonObject
from tokenmill.stages.chat.sandbox import TemplateEnvironment, raise_exception
from tokenmill.stages.chat.template import ChatTemplate, Program

_STRIP = frozenset(("strip", "lstrip", "rstrip"))
_SEARCHES = frozenset(("startswith", "endswith"))
_DIVISIONS = frozenset(("split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix"))

_LIST_FILTERS = frozenset(("length", "count", "first", "last", "list", "reverse", "selectattr", "rejectattr", "map"))
"""Filters of lists that do not read the contents inside, except through filters, tests and attributes."""

_TEXT_FILTERS = frozenset(("trim", "string", "default", "d"))

_TEXT_TESTS = {
    **dict.fromkeys(("string", "iterable", "sequence", "defined"), True),
    **dict.fromkeys(("undefined", "none", "mapping", "number", "integer", "float", "boolean", "true", "false"), False),
    "callable": False,
}
"""The tests of a type, with their result for a text."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
"""Comparisons by the names of Jinja's syntax tree."""

_COMPILER_ARGUMENTS = frozenset(("_loop_vars", "_block_vars"))
"""Arguments that Jinja's compiler adds to calls inside blocks: all variables there."""

_ALIASES = {"==": "eq", "equalto": "eq", "!=": "ne", "in": "in", "eq": "eq", "ne": "ne"}
"""Tests that are comparisons."""


class _Text(str):
    """A text that contains a content. Jinja and the sandbox preserve this class; any unexpected use is refused."""

    trace: "TracedEnvironment"

    def __add__(self, other: str) -> "_Text":
        return self.trace.mark(str.__add__(self, other))

    def __radd__(self, other: str) -> "_Text":
        return self.trace.mark(str.__add__(other, self))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.trace.refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = _refuse
    __iter__ = __getitem__ = __mod__ = __rmod__ = __mul__ = __rmul__ = __format__ = __repr__ = _refuse


class _Content(_Text):
    """A complete content, perhaps without blanks around it."""


class TracedEnvironment(TemplateEnvironment):
    """An environment that records the constants with which a template compares contents."""

    intercepted_binops = frozenset("%")

    def __init__(self) -> None:
        """Replace the filters and tests."""
        super().__init__()
        self.refused = False
        self.constants: set[str] = set()
        self.contents: set[str] = set()
        self._text, self._content = (type(kind.__name__, (kind,), {"trace": self}) for kind in (_Text, _Content))
        for name, function in self.filters.items():
            if name != "~":  # an operator, which calls the methods of this class
                self.filters[name] = self._trace_filter(name, function)
        for name, test in self.tests.items():
            self.tests[name] = self._trace_test(name, cast("Callable[..., bool]", test))
        for name in _OPERATORS:
            self.filters[f"?{name}"] = self._make_comparison(name)

    def prepare(self, tree: nodes.Template) -> nodes.Template:
        """Return the tree with comparisons that this environment makes."""
        _Comparisons().visit(tree)
        return super().prepare(tree)

    def refuse(self) -> NoReturn:
        """Record that the rendered text depends on the contents."""
        self.refused = True
        raise SecurityError("it uses the characters of a content")

    def mark(self, text: str) -> _Text:
        """Return a text that contains contents."""
        return self._text(text)  # type: ignore[no-any-return]

    def make_content(self, content: str) -> _Content:
        """Return a content for a message."""
        self.contents.add(content)
        return self._content(content)  # type: ignore[no-any-return]

    # -- output

    def concat(self, chunks: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block; a content alone stays a content."""
        chunks = [chunk for chunk in chunks if chunk]
        if len(chunks) == 1:
            return chunks[0]
        text = super().concat(chunks)
        return self.mark(text) if any(isinstance(chunk, _Text) for chunk in chunks) else text

    def text(self, value: Any) -> str:
        """Return the text of a value."""
        if isinstance(value, _Text):
            return value
        if _has_content(value):
            self.refuse()
        return super().text(value)

    # -- operations

    def _compare(self, name: str, left: Any, right: Any) -> Any:
        """Return the result of a comparison; that of a content with a constant is what most contents give."""
        if not _has_content(left) and not _has_content(right):
            return _OPERATORS[name](left, right)
        if name in ("eq", "ne"):
            if isinstance(right, _Content):
                left, right = right, left
            if isinstance(left, _Content) and not _has_content(right):
                self._record(right)
                return name == "ne"
        elif name in ("in", "notin"):
            if isinstance(right, _Content) and type(left) is str:
                self._record(left)
                return (left == "") == (name == "in")
            if isinstance(left, _Content) and isinstance(right, (list, tuple)) and not _has_content(right):
                for item in right:
                    self._record(item)
                return name == "notin"
            if isinstance(right, dict) and not _has_content(left):
                return _OPERATORS[name](left, right)
        return self.refuse()

    def _record(self, constant: object) -> None:
        if isinstance(constant, str) and constant:
            self.constants.add(constant)

    def _make_comparison(self, name: str) -> Callable[[Any, Any], Any]:
        return lambda left, right: self._compare(name, left, right)

    def _trace_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        pass_arg = getattr(function, "jinja_pass_arg", None)
        skip = int(pass_arg is not None)

        def traced(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[skip:]
            if _has_content((others, kwargs)):
                self.refuse()
            if isinstance(value, _Text):
                if name not in _TEXT_FILTERS:
                    self.refuse()
                return self._strip(value, "strip", *others, **kwargs) if name == "trim" else value
            if name not in _LIST_FILTERS and _has_content(value):
                self.refuse()
            result = function(*args, **kwargs)
            if isinstance(result, Markup):  # it would escape the texts that are added to it
                self.refuse()
            return result

        if pass_arg is not None:
            traced.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return traced

    def _trace_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        pass_arg = getattr(function, "jinja_pass_arg", None)
        skip = int(pass_arg is not None)

        def traced(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[skip:]
            if isinstance(value, _Text) and not others and name in _TEXT_TESTS:
                return _TEXT_TESTS[name]
            if _has_content((value, others, kwargs)):
                if name in _ALIASES and len(others) == 1:
                    return self._compare(_ALIASES[name], value, others[0])
                if name not in _TEXT_TESTS:
                    self.refuse()
            return function(*args, **kwargs)

        if pass_arg is not None:
            traced.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return traced

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`."""
        if isinstance(obj, _Text):
            return self._get_method(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`."""
        if _has_content(argument):
            self.refuse()
        if isinstance(obj, _Text):
            return self._get_method(obj, argument)
        return super().getitem(obj, argument)

    def _get_method(self, text: _Text, name: object) -> Any:
        """Return a method of a text that is evaluated here; a text has no attributes but methods."""
        if not isinstance(name, str):
            self.refuse()
        if not hasattr(str, name):
            return self.undefined(obj="", name=name)
        return _Method(text, name)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro or global function."""
        if isinstance(obj, Macro) or obj is Namespace or obj is raise_exception:
            return super().call(context, obj, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _COMPILER_ARGUMENTS}
        if _has_content((args, kwargs)):
            self.refuse()
        if isinstance(obj, _Method):
            return self._call_method(obj.text, obj.name, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `%`."""
        if _has_content((left, right)):
            self.refuse()
        return super().call_binop(context, operator, left, right)

    def _call_method(self, text: _Text, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _STRIP:
            return self._strip(text, name, *args, **kwargs)
        if not isinstance(text, _Content) or not args or not isinstance(args[0], str) or not args[0]:
            self.refuse()
        if name in _SEARCHES:
            self._record(args[0])
            return False
        if name not in _DIVISIONS:
            self.refuse()
        self._record(args[0])
        method = getattr("", name)
        method(*args, **kwargs)  # raises what it would raise for the content
        if name in ("split", "rsplit"):
            return [text]
        if name in ("partition", "rpartition"):
            return (text, "", "") if name == "partition" else ("", "", text)
        return text

    def _strip(self, text: _Text, name: str, chars: Any = None) -> _Text:
        """Return a text without blanks around it; contents do not begin or end with blanks."""
        if chars is not None and (not isinstance(chars, str) or (chars and not chars.isspace())):
            self.refuse()
        stripped = getattr(str, name)(text, chars)
        return self.make_content(stripped) if stripped in self.contents else self.mark(stripped)


class _Method:
    """A method of a text, which only `TracedEnvironment.call` uses."""

    def __init__(self, text: _Text, name: str) -> None:
        self.text = text
        self.name = name


class _Comparisons(NodeTransformer):
    """Replace comparisons by filters of the environment."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        left, parts = node.expr, []
        for operand in node.ops:
            name = f"?{operand.op}"
            parts.append(nodes.Filter(left, name, [operand.expr], [], None, None, lineno=node.lineno))
            left = operand.expr
        expression: nodes.Expr = parts.pop()
        while parts:
            expression = nodes.And(parts.pop(), expression, lineno=node.lineno)
        return expression


def _has_content(value: Any) -> bool:
    """Return whether a value contains a content, or can contain one."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, _Text):
            return True
        if item is None or isinstance(item, (str, int, float, Undefined, range)):
            continue
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple, set)):
            stack += item
        else:
            return True
    return False


class TracedTemplate(ChatTemplate):
    """A template that records how it uses the contents of the messages."""

    def __init__(self, template: ChatTemplate) -> None:
        """Compile the template again."""
        super().__init__(template.source, name=template.name, **template.parameters)
        self._environment = TracedEnvironment()
        self._traced = Program(self, self._environment)

    @property
    def refused(self) -> bool:
        """Whether the text depends on more than the recorded constants since `begin`."""
        return self._environment.refused

    @property
    def constants(self) -> set[str]:
        """The texts that a content must not contain, since `begin`."""
        return self._environment.constants

    def begin(self) -> None:
        """Forget what was recorded."""
        self._environment.refused = False
        self._environment.constants, self._environment.contents = set(), set()

    def render(
        self,
        messages: list[JsonObject],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, and record the uses of its contents."""
        make = self._environment.make_content
        marked = [
            {**message, "content": make(content)}
            if isinstance(content := message["content"], str)
            else {**message, "content": [{**part, "text": make(part["text"])} for part in content]}
            for message in messages
        ]
        values = {**variables, "add_generation_prompt": add_generation_prompt}
        return "".join((self._traced.render(marked, tools, values),))
