"""Layouts from a file, each judged as Megatron-LM would: what `tokenmill fit --check` answers.

A case has the fields of `Layout`; of a model with experts the linear layers have no biases unless it says so.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError
from tokenmill.training import MOST
from tokenmill.training.planner.layout import Layout, late_refusals, refusals
from tokenmill.training.planner.memory import activation_bytes, weight_optimizer_bytes

FIELDS = {field.name: field for field in fields(Layout)}
RECOMPUTE = ("none", "selective", "full")


def read(path: Path) -> list[Any]:
    """Read the cases: a JSON list of settings, or {"cases": [{"config": settings}, ...]}.

    Raises:
        RequestError: the file is missing, no JSON, or neither.
    """
    import msgspec

    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as problem:
        raise RequestError(f"the cases {path} cannot be read: {problem.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as problem:
        raise RequestError(f"the cases {path} are no JSON: {problem}") from None
    if isinstance(content, dict) and "cases" in content:
        content = content["cases"]
    if not isinstance(content, list):
        raise RequestError(f'the cases {path} are neither a list of settings nor {{"cases": [{{"config": settings}}]}}')
    return [case["config"] if isinstance(case, dict) and "config" in case else case for case in content]


def answers(cases: list[Any]) -> Iterator[dict[str, Any]]:
    """Judge each case: whether Megatron-LM accepts it, why not, its data parallelism and its memory in bytes.

    A case that describes no layout gets an `error` instead.
    """
    for number, case in enumerate(cases):
        try:
            yield {"case": number, **_answer(_layout(case))}
        except RequestError as problem:
            yield {"case": number, "error": f"case {number}: {problem}"}


def _layout(case: Any) -> Layout:
    import msgspec

    if not isinstance(case, dict):
        raise RequestError(f"settings are an object, not {case!r}")
    unknown = [key for key in case if key not in FIELDS]
    if unknown:
        raise RequestError(f"unknown key {', '.join(map(repr, unknown))}; there are: {', '.join(FIELDS)}")
    missing = [name for name, field in FIELDS.items() if field.default is MISSING and name not in case]
    if missing:
        raise RequestError(f"without {', '.join(missing)} there is no layout")
    for key, value in case.items():
        try:
            msgspec.convert(value, FIELDS[key].type)
        except msgspec.ValidationError as problem:
            raise RequestError(f"{key} is {value!r}: {problem}") from None
        if isinstance(value, int) and not isinstance(value, bool) and not 0 < value <= MOST:
            raise RequestError(f"{key} is {value}: it must be {'above 0' if value <= 0 else f'at most {MOST}'}")
    if case.get("recompute", "none") not in RECOMPUTE:
        raise RequestError(f"recompute is {case['recompute']!r}: it must be one of {', '.join(RECOMPUTE)}")
    return Layout(**{"bias": not case.get("experts"), **case})


def _answer(layout: Layout) -> dict[str, Any]:
    reasons = refusals(layout)
    return {
        "accepted": not reasons,
        "why": "; ".join(reasons) or None,
        "reasons": reasons,
        "data_parallel": None if layout.world % layout.model_parallel else layout.data_parallel,
        "weight_optimizer_bytes": None if reasons else weight_optimizer_bytes(layout),
        "activation_bytes": None if reasons else activation_bytes(layout),
        "later": [] if reasons else late_refusals(layout),
    }
