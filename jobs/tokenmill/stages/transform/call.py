"""A transform as the user writes it: `sft(input=instruction,output=response)`, or `module:function`.

This module parses the text and never evaluates it. `stages.transform.load` finds the function.
"""

import re
from collections.abc import Iterator, Sequence

from msgspec import field

from tokenmill.engine.contract import Record

_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_TOKEN = re.compile(
    r"""
    [ \t]*
    (?: (?P<mark>[=,]) | "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>(?:[^'\\]|\\.)*)' | (?P<word>[^=,"'()]+) )
    """,
    re.VERBOSE,
)


class TransformCall(Record, frozen=True):
    """The name of a transform and its arguments, which are names of fields; `named` has the keyword arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)

    @property
    def is_user_function(self) -> bool:
        """Whether the name is `module:function`."""
        return ":" in self.name

    def __str__(self) -> str:
        """Return the call as a user writes it."""
        arguments = [*map(_quote, self.arguments), *(f"{key}={_quote(value)}" for key, value in self.named.items())]
        return f"{self.name}({','.join(arguments)})" if arguments else self.name


def parse_call(text: str, settings: Sequence[str] = ()) -> TransformCall:
    """Parse NAME, NAME(arguments) or module:function; each setting is a further argument, as `key=value` or `value`.

    An argument is a word, or a text in quotes if it contains a comma, a quote, a parenthesis or `=`.

    Raises:
        ValueError: the text is not a call; the message contains the remedy.
    """
    name, parenthesis, rest = text.strip().partition("(")
    name = name.strip()
    if not (_NAME.fullmatch(name) or _FUNCTION.fullmatch(name)):
        raise ValueError(f"{text!r} is not a transform; write it as NAME, NAME(key=field,...) or module:function")
    arguments: list[str] = []
    named: dict[str, str] = {}
    if parenthesis and not rest.endswith(")"):
        raise ValueError(f"{text!r} has no ) at its end; add it, and quote the text in the shell")
    pairs = [*_parse_arguments(rest[:-1], text)] if parenthesis else []
    for setting in settings:
        first, equals, second = setting.partition("=")
        pairs.append((first, second) if equals else (None, setting))
    for key, value in pairs:
        if key is None and named:
            raise ValueError(f"{text!r}: the argument {value!r} follows a named argument; write it before them")
        if key is None:
            arguments.append(value)
        elif not key or key in named:
            raise ValueError(f"{text!r}: the argument {key!r} is empty or repeated; specify each argument once")
        else:
            named[key] = value
    return TransformCall(name, tuple(arguments), named)


def _parse_arguments(arguments: str, text: str) -> Iterator[tuple[str | None, str]]:
    """Yield the key and the value of each argument; the key of a positional argument is None."""
    values: list[str] = []
    expect_value = False
    for kind, value in [*_split(arguments, text), ("mark", ",")]:
        if kind == "text" and len(values) < 1 + expect_value:
            values.append(value)
        elif value == "=" and kind == "mark" and len(values) == 1 and not expect_value:
            expect_value = True
        elif value == "," and kind == "mark" and len(values) == 1 + expect_value:
            yield (values[0], values[1]) if expect_value else (None, values[0])
            values, expect_value = [], False
        elif arguments.strip():
            raise ValueError(
                f"{text!r} is not a list of arguments; write them as key=field with commas between them, and quote a "
                "field whose name contains a comma, a quote, a parenthesis or ="
            )


def _split(arguments: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of a list of arguments: ("mark", "=" or ",") and ("text", value)."""
    position = 0
    end = len(arguments.rstrip())
    while position < end:
        match = _TOKEN.match(arguments, position, end)
        if match is None:
            raise ValueError(
                f"{text!r} has an unexpected {arguments[position]!r}; quote a field whose name contains a comma, a "
                "quote, a parenthesis or ="
            )
        position = match.end()
        if match["mark"]:
            yield "mark", match["mark"]
        elif match["word"] is not None:
            yield "text", match["word"].strip()
        else:
            yield "text", re.sub(r"\\(.)", r"\1", match["double"] if match["double"] is not None else match["single"])


def _quote(value: str) -> str:
    if value and value == value.strip() and not re.search(r"[=,\"'()]", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'
