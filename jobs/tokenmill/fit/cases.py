"""Layouts from a file, each checked against Megatron-LM's rules: the output of `tokenmill fit --check`.

A case has the fields of `Layout`. The default of `bias` is false for a model with experts.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import convert_json, decode_json
from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout, find_argument_errors, find_runtime_errors
from tokenmill.fit.memory import activation_bytes, weight_optimizer_bytes
from tokenmill.models.defaults import MAX_COUNT

FIELDS = {field.name: field for field in fields(Layout)}
RECOMPUTE_MODES = ("none", "selective", "full")


class EvaluatedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A layout: Megatron-LM's errors, the data parallelism, and the memory in bytes of an accepted layout.

    `later` has the errors that Megatron-LM reports only while it starts.
    """

    case: int
    accepted: bool
    why: str | None
    reasons: list[str]
    data_parallel: int | None
    weight_optimizer_bytes: float | None
    activation_bytes: float | None
    later: list[str]


class InvalidCase(msgspec.Struct, frozen=True):
    """A case that is not a layout, and the reason."""

    case: int
    error: str


def read_cases(path: Path) -> list[Any]:
    """Read the cases: a JSON list of objects, or {"cases": [{"config": object}, ...]}.

    Raises:
        RequestError: the file does not exist, is not JSON, or has another form.
    """
    try:
        content = decode_json(read_named_file(path, "the cases"))
    except OSError as error:
        raise RequestError(
            f"cannot read the cases {path}: {error.strerror}; check the path and its permissions"
        ) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the cases {path} are not valid JSON: {error}; correct the file") from None
    if isinstance(content, dict) and "cases" in content:
        content = content["cases"]
    if not isinstance(content, list):
        raise RequestError(
            f'the cases {path} have another form: write a JSON list of layouts, or {{"cases": [{{"config": layout}}]}}'
        )
    return [case["config"] if isinstance(case, dict) and "config" in case else case for case in content]


def evaluate_cases(cases: list[Any]) -> Iterator[EvaluatedCase | InvalidCase]:
    """Yield the result of each case."""
    for number, case in enumerate(cases):
        try:
            yield _evaluate(number, _parse_layout(case))
        except RequestError as error:
            yield InvalidCase(number, f"case {number}: {error}")


def _parse_layout(case: Any) -> Layout:
    if not isinstance(case, dict):
        raise RequestError(f"{case!r} is not an object; write an object with the fields of a layout")
    unknown = [key for key in case if key not in FIELDS]
    if unknown:
        raise RequestError(f"unknown key {', '.join(map(repr, unknown))}; use only: {', '.join(FIELDS)}")
    missing = [name for name, field in FIELDS.items() if field.default is MISSING and name not in case]
    if missing:
        raise RequestError(f"missing key {', '.join(missing)}; add it")
    for key, value in case.items():
        try:
            convert_json(value, FIELDS[key].type)
        except msgspec.ValidationError as error:
            raise RequestError(f"{key} is {value!r}: {error}; correct it") from None
        if isinstance(value, int) and not isinstance(value, bool) and not 0 < value <= MAX_COUNT:
            raise RequestError(
                f"{key} is {value}: it must be {'above 0' if value <= 0 else f'at most {MAX_COUNT}'}; correct it"
            )
    if case.get("recompute", "none") not in RECOMPUTE_MODES:
        raise RequestError(f"recompute is {case['recompute']!r}: use one of {', '.join(RECOMPUTE_MODES)}")
    return Layout(**{"bias": not case.get("experts"), **case})


def _evaluate(number: int, layout: Layout) -> EvaluatedCase:
    reasons = find_argument_errors(layout)
    return EvaluatedCase(
        case=number,
        accepted=not reasons,
        why="; ".join(reasons) or None,
        reasons=reasons,
        data_parallel=None if layout.world % layout.model_parallel else layout.data_parallel,
        weight_optimizer_bytes=None if reasons else weight_optimizer_bytes(layout),
        activation_bytes=None if reasons else activation_bytes(layout),
        later=[] if reasons else find_runtime_errors(layout),
    )
