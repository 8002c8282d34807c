"""Find the function of a transform, and compute the hash by which a plan detects that the function changed.

A built-in transform is identified by its name and arguments. A function of the user is identified by the hash of its
source file; modules that this file imports are not covered.
"""

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.core.printing import printable
from tokenmill.core.redaction import redact
from tokenmill.errors import REPLACE_OPTION, RequestError
from tokenmill.stages.transform.builtin import BUILTIN, BuiltinTransform, make_builtin
from tokenmill.stages.transform.call import TransformCall
from tokenmill.stages.transform.types import Transform

MAX_TEXT = 500
"""Characters of the text of an exception in a message."""


class LoadedTransform(NamedTuple):
    """A function, the call that a plan records for it, and the hash of a function of the user."""

    function: Transform
    call: TransformCall
    code: str = ""


def load_transform(call: TransformCall) -> LoadedTransform:
    """Return the function of a call.

    A module of the user is searched in the current directory, and then where Python searches.

    Raises:
        RequestError: there is no such transform, module or function, or the arguments are wrong.
    """
    if not call.is_user_function:
        return wrap_function(_call_factory(call))  # the call with its default arguments
    if call.arguments or call.named:
        raise RequestError(
            f"--transform {call}: a function of yours takes the record and no arguments; remove the arguments, or "
            "write another function that has them"
        )
    return LoadedTransform(*_import_function(call.name))


def load_planned(call: TransformCall, code: str) -> Transform:
    """Return the function of a planned call.

    Raises:
        RequestError: the source file of the function changed after it was planned.
    """
    loaded = load_transform(call)
    if loaded.code != code:
        raise RequestError(
            f"the source file of {call} changed after it was planned; restore the file, or run the same command with "
            f"{REPLACE_OPTION}"
        )
    return loaded.function


def wrap_function(function: Callable[..., Any]) -> LoadedTransform:
    """Return a function of a Python program as a transform; a built-in transform keeps its call.

    The hash covers the source text of the function and the values that the function refers to.

    Raises:
        RequestError: the argument is not a function.
    """
    if isinstance(function, BuiltinTransform):
        return LoadedTransform(function, TransformCall(function.name, function.arguments, dict(function.named)))
    if not callable(function):
        raise RequestError(f"the transform is {function!r}, and must be a function of a record; pass a function")
    name = f"{getattr(function, '__module__', None) or 'python'}:{_get_name(function)}"
    return LoadedTransform(function, TransformCall(name), _hash(_describe_function(function).encode()))


@contextmanager
def redirect_output() -> Iterator[None]:
    """Send what a module of the user prints to standard error: standard output has the result of the command."""
    with redirect_stdout(sys.stderr):
        yield


def describe_exception(error: BaseException) -> str:
    """Return the text of an exception of the user's code on one line and not too long, without secrets."""
    try:
        text = str(error)
    except Exception:  # a method of the user fails
        text = "an exception without a text"
    text = redact(text[: 2 * MAX_TEXT])  # before the cut, which could leave a part of a secret
    return printable(text, MAX_TEXT)


def is_portable(function: Transform) -> bool:
    """Return whether a child process can receive a function; it cannot receive a lambda or a nested function."""
    try:
        pickle.dumps(function)
    except Exception:  # pickle raises PicklingError, AttributeError or TypeError; a __reduce__ of the user any other
        return False
    return True


def _call_factory(call: TransformCall) -> Transform:
    factory = BUILTIN.get(call.name)
    if factory is None:
        raise RequestError(
            f"--transform {call.name}: there is no such transform; use {', '.join(BUILTIN)}, or module:function for a "
            "function of yours"
        )
    try:
        return make_builtin(call.name, call.arguments, call.named)
    except TypeError as error:
        raise RequestError(f"--transform {call}: wrong arguments; use {_describe_factory(call.name)}") from error


def _describe_factory(name: str) -> str:
    """Return the form of the arguments of a built-in transform."""
    forms = []
    for parameter in inspect.signature(BUILTIN[name]).parameters.values():
        several: dict[object, str] = {parameter.VAR_POSITIONAL: "FIELD,...", parameter.VAR_KEYWORD: "NEW=OLD,..."}
        forms.append(several.get(parameter.kind) or f"{parameter.name}=FIELD")
    return f"{name}({','.join(forms)})"


@lru_cache(maxsize=8)
def _import_function(name: str) -> tuple[Transform, TransformCall, str]:
    """Import the function `module:function`; return it with its call and the hash of its source file."""
    module_name, _, path = name.partition(":")
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        with redirect_output():
            value: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import runs code of the user, which may end with SystemExit
        problem = f"{type(error).__name__}: {describe_exception(error)}"
        raise RequestError(
            f"--transform {name}: importing {module_name} failed ({problem}); run the command in the directory of the "
            "module, or add that directory to PYTHONPATH"
        ) from error
    finally:  # at the end, so that a file such as random.py replaces no module of Python
        if str(Path.cwd()) != directory:
            os.chdir(directory)
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)
    for part in path.split("."):
        if not hasattr(value, part):
            raise RequestError(f"--transform {name}: {module_name} has no {path}; choose one of its functions")
        value = getattr(value, part)
    if isinstance(value, BuiltinTransform):
        return value, TransformCall(name), _hash(repr(value).encode())
    if not callable(value):
        raise RequestError(
            f"--transform {name}: {path} is {type(value).__name__}, and must be a function of a record; choose one"
        )
    source = Path(_find_source(value) or getattr(sys.modules[module_name], "__file__", None) or "")
    if not source.is_file():  # a function in C, or in a module that Python has loaded from its own program
        raise RequestError(
            f"--transform {name}: the function has no source file, so a plan cannot record it; write the function in a "
            "file"
        )
    return value, TransformCall(name), _hash(source.read_bytes())


def _find_source(function: Any) -> str | None:
    """Return the source file of a function, or of the function that a decorator wraps."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an object with __call__, or a function of an extension
        return None


def _describe_function(function: Any) -> str:
    """Return the source text of a function, and its defaults and closure as text."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # a function of an interactive session, or an object
        code = getattr(function, "__code__", None)
        text = f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values = [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None), *cells]
    return "\n".join([text, *(_describe_value(value) for value in values)])


def _describe_value(value: Any) -> str:
    """Return a text that is equal in each process: for objects whose text has their address, only their type."""
    text = repr(value)
    return f"{type(value)}" if " at 0x" in text else text


def _get_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _hash(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128(data).hexdigest()
