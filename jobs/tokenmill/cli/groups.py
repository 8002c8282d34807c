"""Turn Options and groups of them into flags of a command: Typer sees one parameter for each Option."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from tokenmill.engine.options import InvalidOption, Option, Panel


class Declaration(NamedTuple):
    """An Option of a command: the field or parameter that has it, its type and its default (... if it has none).

    The panel is that of the Option, or of the group that declares the field.
    """

    name: str
    kind: Any
    option: Option
    default: Any
    panel: Panel | None

    @property
    def flag(self) -> str:
        """The flag, with the one that unsets it if there is one, such as `--sp/--no-sp`."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is an option group by one parameter for each field of the group."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    declared: list[Declaration] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and is_dataclass(hint):
            own = list(_list_fields(hint))
            groups[parameter.name] = hint, [field.name for field in own]
        elif any(isinstance(part, Option) for part in get_args(hint)):
            kind, option = get_args(hint)
            own = [Declaration(parameter.name, kind, option, parameter.default, option.panel)]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
            continue
        declared += own
        parameters += [_make_parameter(declaration) for declaration in own]

    def check(values: dict[str, object]) -> None:
        """Replace the fields of each group in `values` by the group; end with a usage message if they conflict."""
        for name, (group, names) in groups.items():
            try:
                values[name] = group(**{field: values.pop(field) for field in names})
            except InvalidOption as error:
                raise typer.BadParameter(error.reason, param_hint=error.flag) from error

    @wraps(command)
    def run(**values: Any) -> None:
        check(values)
        command(**values)

    run.check = check  # type: ignore[attr-defined]
    run.declarations = {option.flag.partition("/")[0].lstrip("-"): option for option in declared}  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _list_fields(group: type) -> Iterator[Declaration]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if get_args(hints[field.name])[1:]:
            kind, option = get_args(hints[field.name])
            default = ... if field.default is MISSING else field.default
            owner: Any = next(base for base in group.__mro__ if field.name in inspect.get_annotations(base))
            yield Declaration(field.name, kind, option, default, option.panel or owner.panel)


def _make_parameter(declaration: Declaration) -> Parameter:
    name, kind, option, default, panel = declaration
    flag = declaration.flag
    parse = _choice_parser(option, flag) if option.choices else option.parse and _value_parser(option, flag)
    settings: dict[str, Any] = {"help": option.help, "envvar": option.env, "show_default": option.show_default}
    settings |= {"rich_help_panel": panel, "metavar": option.metavar or None}
    if option.choices:
        settings |= {"metavar": f"[{'|'.join(option.choices)}]", "autocompletion": lambda: [*option.choices]}
    settings |= {"parser": parse} if parse else {"min": option.minimum, "max": option.maximum}
    annotation: Any = Annotated.__class_getitem__((kind, typer.Option(flag, **settings)))  # type: ignore[attr-defined]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _choice_parser(option: Option, flag: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in option.choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(option.choices)}", param_hint=flag)
        return text

    return parse


def _value_parser(option: Option, flag: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text) if option.parse else text
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from error

    return parse
