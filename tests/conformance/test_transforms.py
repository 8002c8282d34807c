"""Compare transforms, written lines and plans of shards with those of the reference program (`sft/README.md`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tokenmill.engine.options import parse_byte_size
from tokenmill.errors import RequestError
from tokenmill.stages.transform.call import parse_call
from tokenmill.stages.transform.lines import encode_line
from tokenmill.stages.transform.load import load_transform
from tokenmill.stages.transform.shards import assign_files, count_shards, sample_shards

DATA = Path(__file__).parent / "sft"
TRANSFORMS = json.loads((DATA / "transforms.json").read_text())
PLANS = json.loads((DATA / "shard_plans.json").read_text())["HEAD"]
LOST_SHARE = "IndexError"
"""The answer of the reference where a share of a file is lost: its defect 8."""


def call(text: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a transform in the form of the vectors."""
    function = load_transform(parse_call(text)).function
    try:
        result = function(json.loads(json.dumps(record)))
    except Exception as error:
        return {"raises": type(error).__name__}
    return {"drop": True} if result is None else {"out": result}


@pytest.mark.parametrize("text", TRANSFORMS["transforms"])
def test_every_record_has_the_result_of_the_reference(text: str) -> None:
    expected = TRANSFORMS["transforms"][text]
    assert [call(text, record) for record in TRANSFORMS["records"]] == expected
    # also in the order of the keys, which is the order in the file
    outputs = [call(text, record).get("out") for record in TRANSFORMS["records"]]
    assert [json.dumps(value) for value in outputs] == [json.dumps(value.get("out")) for value in expected]


@pytest.mark.parametrize("text", TRANSFORMS["jsonl"])
def test_written_lines_have_the_bytes_of_the_reference(text: str) -> None:
    expected = TRANSFORMS["jsonl"][text]
    results = [call(text, record).get("out") for record in TRANSFORMS["records"]]
    lines = b"".join(encode_line(value) + b"\n" for value in results if value is not None)
    assert lines.decode() == expected["text"]
    assert f"xxh64:{xxhash.xxh64_hexdigest(lines)}" == expected["checksum"]
    counts = {"num_records": lines.count(b"\n"), "num_skipped": results.count(None), "total_bytes": len(lines)}
    assert counts == expected["stats"] and not expected["raised"]


@pytest.mark.parametrize(("size", "expected"), PLANS["parse_byte_size"], ids=repr)
def test_size(size: str | float, expected: Any) -> None:
    if isinstance(expected, dict):
        with pytest.raises(ValueError, match="is not a size; write it as"):
            parse_byte_size(size)
    else:
        assert parse_byte_size(size) == expected


@pytest.mark.parametrize(("total", "size", "expected"), PLANS["compute_num_shards"], ids=repr)
def test_number_of_shards(total: int, size: str | int, expected: Any) -> None:
    if isinstance(expected, dict):
        with pytest.raises(ValueError, match="is 0 bytes"):
            count_shards(total, size)
    else:
        assert count_shards(total, size) == expected


@pytest.mark.parametrize("case", PLANS["assignments"], ids=lambda case: f"{len(case['files'])}-{case['num_shards']}")
def test_files_of_each_shard(case: dict[str, Any]) -> None:
    assigned = assign_files([(path, size) for path, size in case["files"]], case["num_shards"])
    plan = [
        {
            "files": [
                [piece.path, piece.remainder, piece.modulus] if piece.modulus > 1 else [piece.path]
                for piece in shard.slices
            ],
            "bytes": shard.bytes,
        }
        for shard in assigned
    ]
    if "raises" in case["assignment"]:
        assert case["assignment"]["raises"].startswith(LOST_SHARE)
        assert [shard["files"] for shard in plan] == [
            [["e/part-000.jsonl", 0, 2]],
            [["e/part-000.jsonl", 1, 2]],
            [["d/part-001.jsonl"]],
            [["d/part-002.jsonl"]],
        ]
    else:
        assert plan == case["assignment"]


@pytest.mark.parametrize(("arguments", "expected"), PLANS["sampled_shards"], ids=repr)
def test_sample_of_shards(arguments: list[Any], expected: list[int]) -> None:
    assert sample_shards(*arguments) == expected


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no such transform; use sft, openai_chat, .*, or module:function"):
        load_transform(parse_call("alpaca"))
