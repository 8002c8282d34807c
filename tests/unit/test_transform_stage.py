"""The stage transform: shards, rejected and dropped records, lineage, and refusals of the command line."""

import bz2
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support import stages
from support.commandline import run_in_process, tokenmill
from support.corpus import REPOSITORY, TOKENIZER
from support.hub import Hub
from support.runs import receipt
from tokenmill.datasets.dataset import find_dataset, find_document
from tokenmill.engine.contract import Part
from tokenmill.engine.lineage import locate
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Plan, StageRecord
from tokenmill.engine.run import run_stage
from tokenmill.engine.stage import StageRun
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.stages.registry import TRANSFORM
from tokenmill.stages.transform import unit as unit_module
from tokenmill.stages.transform.options import TransformOptions
from tokenmill.stages.transform.stage import TransformRecords, suggest_next
from tokenmill.stages.transform.types import RejectedRow

Row = dict[str, Any]


def run(worker: int = 0, workers: int = 1, *, replace: bool = False) -> StageRun:
    return StageRun(Reporter(), worker, workers, processes=1, replace=replace)


def write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[Row]:
    data = path.read_bytes()
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(data) if path.suffix == ".zst" else data
    return [json.loads(line) for line in lines.splitlines()]


def shards(output: Path) -> list[list[Row]]:
    return [read(path) for path in sorted(output.glob("shard_*"))]


def questions(name: str, count: int) -> list[Row]:
    return [{"question": f"{name} {n}?", "answer": f"{n}", "n": n} for n in range(count)]


def parts(output: Path, unit: str) -> list[list[Part]]:
    """Return the parts of each shard of a unit."""
    outputs = receipt(output, "transform", unit)["outputs"]
    return [[Part.from_json(part) for part in entry["parts"]] for entry in outputs if not entry.get("role")]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write two files of 30 and 10 records."""
    write(tmp_path / "corpus" / "a.jsonl", questions("a", 30))
    write(tmp_path / "corpus" / "b.jsonl", questions("b", 10))
    return tmp_path / "corpus"


def test_files_become_shards_of_equal_size(corpus: Path, tmp_path: Path) -> None:
    summary = stages.transform(corpus, tmp_path / "out", run(), transform="rename(input=question,output=answer)")
    assert (tmp_path / "out" / "shard_000000.jsonl").exists()
    (rows,) = shards(tmp_path / "out")
    expected = [*questions("a", 30), *questions("b", 10)]
    assert rows == [{"input": row["question"], "output": row["answer"]} for row in expected]
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts == {"in": 40, "out": 40, "rejected": 0, "dropped": 0, "blank": 0}
    assert parts(tmp_path / "out", "shard_000000") == [[Part("a.jsonl", 0, 30), Part("b.jsonl", 0, 10)]]


@pytest.mark.parametrize("count", [2, 3, 5, 40, 90])
def test_a_file_is_divided_by_the_numbers_of_its_records(corpus: Path, tmp_path: Path, count: int) -> None:
    output = tmp_path / "out"
    stages.transform(corpus, output, run(), transform="passthrough", shards=count)
    written = shards(output)
    assert len(written) == count
    assert sorted(row["question"] for shard in written for row in shard) == sorted(
        row["question"] for row in [*questions("a", 30), *questions("b", 10)]
    )
    plan = StageRecord(output, TRANSFORM).read_plan()
    assert plan is not None
    for unit in plan.units:
        for shard, lineage in zip(spec_shards(plan, unit.id), parts(output, unit.id), strict=True):
            sources = [locate(lineage, ordinal) for ordinal in range(len(read(output / shard)))]
            assert sources == [(f"{row['question'][0]}.jsonl", row["n"]) for row in read(output / shard)]
    assert max(sum(f.path == "a.jsonl" for f in unit.inputs) for unit in plan.units) == 1
    assert sum(any(f.path == "a.jsonl" for f in unit.inputs) for unit in plan.units) <= 8, "few units read a file"


def spec_shards(plan: Plan, unit: str) -> list[str]:
    return [name for u in plan.units if u.id == unit for name in u.outputs if name.startswith("shard_")]


def test_size_of_shards_counts_the_input(corpus: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in corpus.iterdir())
    stages.transform(corpus, tmp_path / "out", run(), transform="passthrough", shard_size=-(-total // 4))
    assert len(shards(tmp_path / "out")) == 4
    assert [sum(map(len, group)) for group in (shards(tmp_path / "out"),)] == [40]


def test_compressed_shards_have_the_same_records(corpus: Path, tmp_path: Path) -> None:
    stages.transform(corpus, tmp_path / "plain", run(), transform="passthrough", shards=3)
    stages.transform(corpus, tmp_path / "zstd", run(), transform="passthrough", shards=3, compression="zstd")
    assert [path.name for path in sorted((tmp_path / "zstd").glob("shard*"))] == [
        f"shard_00000{n}.jsonl.zst" for n in range(3)
    ]
    assert shards(tmp_path / "zstd") == shards(tmp_path / "plain")
    assert parts(tmp_path / "zstd", "shard_000000") == parts(tmp_path / "plain", "shard_000000")


CHAT: list[Row] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "calls": [{"a": 1}]}]},
    {"messages": [{"role": "user", "content": "é"}], "tools": [{"b": "x"}], "time": 1.5},
    {"messages": [], "score": 7},
]


def forms() -> Iterator[tuple[str, Callable[[Path], None], dict[str, str]]]:
    lines = "".join(json.dumps(row) + "\n" for row in CHAT).encode()
    yield "a.jsonl", lambda path: path.write_bytes(lines) and None, {}
    yield "a.jsonl.zst", lambda path: path.write_bytes(zstandard.compress(lines)) and None, {}
    yield "a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(lines)) and None, {}
    yield "a.jsonl.bz2", lambda path: path.write_bytes(bz2.compress(lines)) and None, {}
    yield "a.json", lambda path: path.write_text(json.dumps(CHAT, indent=2)) and None, {"format": "json"}
    yield "a.data", lambda path: path.write_bytes(b"\xef\xbb\xbf\n" + lines.strip()) and None, {"format": "jsonl"}
    yield "a.parquet", lambda path: pq.write_table(pa.Table.from_pylist(CHAT_COLUMNS), path), {}
    yield "a.arrow", write_arrow, {}


CHAT_COLUMNS: list[Row] = [{**dict.fromkeys(("messages", "tools", "time", "score")), **row} for row in CHAT]


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(CHAT_COLUMNS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize(
    ("name", "make", "options"), [*forms()], ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("count", [1, 2])
def test_each_form_of_input_gives_the_same_records(
    tmp_path: Path, name: str, make: Callable[[Path], None], options: dict[str, str], count: int
) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / name)
    stages.transform(tmp_path / "in", tmp_path / "out", run(), transform="passthrough", shards=count, **options)
    columnar = name.endswith(("parquet", "arrow"))
    expected = json.loads(json.dumps(CHAT))
    if columnar:  # a null field of a column is a field that the record lacks
        del expected[0]["messages"][1]["content"]
    assert shards(tmp_path / "out") == [expected[index::count] for index in range(count)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a module of the user in the current directory; its name is new for each test."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = directory / f"own_{abs(hash(str(tmp_path)))}.py"
    path.write_text(
        "def halve(row):\n"
        "    if row['n'] % 2:\n        return None\n"
        "    row['n'] //= 2\n    return row\n"
        "def fail(row):\n"
        "    if row['n'] == 3:\n        raise KeyError('messages')\n"
        "    return [row] if row['n'] == 5 else row\n"
        "def refuse(row):\n"
        "    from tokenmill.stages.transform.types import RejectedRow\n"
        "    if row['n'] in (3, 5):\n        raise RejectedRow(f\"n is {row['n']}\")\n"
        "    return row\n"
        "def surrogate(row):\n"
        "    return {'text': chr(0xd800)} if row['n'] == 3 else row\n"
        "def nothing(row):\n    return None\n"
        "import os, sys\n"
        "class NoText(Exception):\n    def __str__(self):\n        raise ValueError\n"
        "def leave(row):\n    sys.exit(0)\n"
        "def end(row):\n    raise GeneratorExit('ended')\n"
        "def no_text(row):\n    raise NoText\n"
        "def long_text(row):\n    raise ValueError('x' * 100_000)\n"
        "def control(row):\n    raise ValueError('a\\n\\x1b[31mb\\ud800')\n"
        "def memory(row):\n    raise MemoryError\n"
        "def secret(row):\n    raise ValueError('no access with ' + os.environ['HF_TOKEN'])\n"
        "def elsewhere(row):\n    os.chdir('/')\n    return row\n"
        "def printing(row):\n    print('row', row['n'])\n    return row\n"
    )
    return path


def test_none_drops_a_record(corpus: Path, tmp_path: Path, module: Path) -> None:
    summary = stages.transform(corpus, tmp_path / "out", run(), transform=f"{module.stem}:halve")
    (rows,) = shards(tmp_path / "out")
    assert [row["n"] for row in rows] == [*range(15), *range(5)]
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts == {"in": 40, "out": 20, "rejected": 0, "dropped": 20, "blank": 0}
    (lineage,) = parts(tmp_path / "out", "shard_000000")
    expected = [(name, 2 * n) for name, count in (("a.jsonl", 15), ("b.jsonl", 5)) for n in range(count)]
    assert [locate(lineage, ordinal) for ordinal in range(20)] == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("fail", r"a\.jsonl, line 4: the transform failed: KeyError: 'messages'\. Correct or quarantine the record"),
        ("refuse", r"a\.jsonl, line 4: n is 3\. Correct"),
        ("surrogate", r"a\.jsonl, line 4: 'text' contains a lone surrogate, which is not a character\. Correct"),
    ],
)
def test_a_bad_record_ends_the_run(corpus: Path, tmp_path: Path, module: Path, function: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        stages.transform(corpus, tmp_path / "out", run(), transform=f"{module.stem}:{function}")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("leave", "SystemExit: 0"),
        ("end", "GeneratorExit: ended"),
        ("no_text", "NoText: an exception without a text"),
        ("long_text", f"ValueError: {'x' * 497}..."),
        ("control", r"ValueError: a\n\x1b[31mb\ud800"),
    ],
)
def test_any_exception_of_a_function_is_a_reason(
    corpus: Path, tmp_path: Path, module: Path, function: str, expected: str
) -> None:
    with pytest.raises(InputError) as error:
        stages.transform(corpus, tmp_path / "out", run(), transform=f"{module.stem}:{function}")
    assert f"a.jsonl, line 1: the transform failed: {expected}. Correct or quarantine" in str(error.value)


def test_a_function_without_memory_is_tried_again(corpus: Path, tmp_path: Path, module: Path) -> None:
    with pytest.raises(TransientError, match=r"a\.jsonl, line 1: memory ran out in the transform \(.*\); raise the"):
        stages.transform(corpus, tmp_path / "out", run(), transform=f"{module.stem}:memory")


def test_reasons_in_the_quarantine_have_no_secret(
    corpus: Path, tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tokenmill(
        "transform",
        corpus,
        tmp_path / "out",
        *("--transform", f"{module.stem}:secret", "--on-bad-record", "quarantine", "--processes", 1),
        HF_TOKEN="hf_NotATokenButLongEnough",
        PYTHONPATH=str(module.parent),
    )
    assert result.code == 2
    (rejected,) = (tmp_path / "out" / "rejected").iterdir()
    assert read(rejected)[0]["reason"] == "the transform failed: ValueError: no access with <redacted>"


def test_a_function_may_change_the_directory(
    corpus: Path, tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input and output are relative paths, and each block has one record."""
    monkeypatch.setattr(unit_module, "BLOCK_BYTES", 30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(module.parent)
    stages.transform(Path("corpus"), Path("out"), run(), transform=f"{module.stem}:elsewhere", shards=2)
    assert Path.cwd() == tmp_path
    assert sum(map(len, shards(Path("out")))) == 40


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_output_of_a_function_does_not_mix_with_the_result(
    corpus: Path, tmp_path: Path, module: Path, processes: int
) -> None:
    module.write_text(f"print('imported')\n{module.read_text()}")
    command = ["transform", corpus, tmp_path / "out", "--transform", f"{module.stem}:printing", "--shards", 2, "--json"]
    result = tokenmill(*command, "--processes", processes, PYTHONPATH=str(module.parent))
    assert result.code == 0
    assert result.result["counts"]["out"] == 40
    assert "imported" in result.err and "row 29" in result.err


def test_rejected_records_move_no_later_record(
    corpus: Path, tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function rejects records of the first blocks; the numbers of the records in later blocks stay the same."""
    monkeypatch.setattr(unit_module, "BLOCK_BYTES", 200)
    with (corpus / "b.jsonl").open("a") as file:
        file.write("\n{bad\n" + "".join(json.dumps(row) + "\n" for row in questions("b", 10)[6:]))
    options: Row = {"transform": f"{module.stem}:fail", "on_bad_record": "quarantine"}
    for count in (1, 3):
        output = tmp_path / f"out-{count}"
        summary = stages.transform(corpus, output, run(), shards=count, **options)
        written = [row["question"] for shard in shards(output) for row in shard]
        expected = [row["question"] for row in [*questions("a", 30), *questions("b", 10), *questions("b", 10)[6:]]]
        assert sorted(written) == sorted(text for text in expected if text[2:] not in ("3?", "5?"))
        rejected = [row for path in sorted((output / "rejected").iterdir()) for row in read(path)]
        assert sorted((row["file"], row["line"]) for row in rejected) == [
            *(("a.jsonl", line) for line in (4, 6)),
            *(("b.jsonl", line) for line in (4, 6, 12)),
        ]
        for shard_unit in summary.plan.units:
            for shard, lineage in zip(
                spec_shards(summary.plan, shard_unit.id), parts(output, shard_unit.id), strict=True
            ):
                for ordinal, row in enumerate(read(output / shard)):
                    name, record = locate(lineage, ordinal) or ("", 0)
                    assert name[0] == row["question"][0]
                    assert record == row["n"] or (record - 5 == row["n"] and record > 10)


def test_records_behind_the_limit_of_a_shard_are_not_read(corpus: Path, tmp_path: Path) -> None:
    (corpus / "b.jsonl").unlink()
    with (corpus / "a.jsonl").open("a") as file:
        file.write("{bad\n")
    stage = TransformRecords(
        input=corpus, output=tmp_path / "out", options=TransformOptions(transform="passthrough"), shard_limit=30
    )
    summary = run_stage(stage, run())
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts == {"in": 30, "out": 30, "rejected": 0, "dropped": 0, "blank": 0}


def test_a_bad_record_is_quarantined(corpus: Path, tmp_path: Path, module: Path) -> None:
    with (corpus / "b.jsonl").open("a") as file:
        file.write('\n{"n": \n[3]\n{"n": 1, "x": "\\ud800"}\n')
    summary = stages.transform(
        corpus, tmp_path / "out", run(), transform=f"{module.stem}:fail", on_bad_record="quarantine"
    )
    assert summary.completion.manifest is not None
    counts = summary.completion.manifest.counts
    assert (counts["in"], counts["out"], counts["rejected"], counts["blank"]) == (43, 36, 7, 1)
    rejected = read(tmp_path / "out" / "rejected" / "shard_000000.jsonl")
    assert [(row["file"], row["line"], row["code"], row["reason"]) for row in rejected] == [
        ("a.jsonl", 4, "transform_failed", "the transform failed: KeyError: 'messages'"),
        ("a.jsonl", 6, "transform_result", "the transform returned list, not an object or None"),
        ("b.jsonl", 4, "transform_failed", "the transform failed: KeyError: 'messages'"),
        ("b.jsonl", 6, "transform_result", "the transform returned list, not an object or None"),
        ("b.jsonl", 12, "invalid_json", rejected[4]["reason"]),
        ("b.jsonl", 13, "no_object", "the record is a list, not an object"),
        ("b.jsonl", 14, "transform_refused", "'x' contains a lone surrogate, which is not a character"),
    ]
    assert json.loads(rejected[0]["record"]) == questions("a", 4)[3]
    (lineage,) = parts(tmp_path / "out", "shard_000000")
    assert [locate(lineage, ordinal) for ordinal in (2, 3, 4, 27, 28, 35)] == [
        ("a.jsonl", 2),
        ("a.jsonl", 4),
        ("a.jsonl", 6),
        ("a.jsonl", 29),
        ("b.jsonl", 0),
        ("b.jsonl", 9),
    ]


def test_too_many_bad_records_end_the_run(corpus: Path, tmp_path: Path, module: Path) -> None:
    options = {"transform": f"{module.stem}:fail", "on_bad_record": "quarantine", "max_bad_records": 3}
    with pytest.raises(
        InputError, match=r"more than 3 bad records for shard_000000, the latest in .*b\.jsonl, line 6:"
    ):
        stages.transform(corpus, tmp_path / "out", run(), **options)


def test_divided_files_report_bad_records_once(corpus: Path, tmp_path: Path, module: Path) -> None:
    options = {"transform": f"{module.stem}:refuse", "on_bad_record": "quarantine"}
    summary = stages.transform(corpus, tmp_path / "out", run(), shards=20, **options)
    assert summary.completion.manifest is not None
    counts = summary.completion.manifest.counts
    assert (counts["in"], counts["out"], counts["rejected"]) == (40, 36, 4)
    lines = sorted(
        (row["file"], row["line"]) for path in (tmp_path / "out" / "rejected").iterdir() for row in read(path)
    )
    assert lines == [("a.jsonl", 4), ("a.jsonl", 6), ("b.jsonl", 4), ("b.jsonl", 6)]


def test_a_run_that_drops_every_record_fails(corpus: Path, tmp_path: Path, module: Path) -> None:
    with pytest.raises(RequestError, match="records"):
        stages.transform(corpus, tmp_path / "out", run(), transform=f"{module.stem}:nothing")


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (
            "sft",
            r"a\.jsonl: --transform sft\(.*\) gives no record for the first 30 records; line 1: it lacks a key of the "
            r"transform; it has 'question', 'answer', 'n'; correct the arguments",
        ),
        ("select(id)", r"--transform select\(id\) gives no record .* it lacks a key of the transform"),
    ],
)
def test_wrong_keys_are_refused_before_the_run(corpus: Path, tmp_path: Path, transform: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        stages.transform(corpus, tmp_path / "out", run(), transform=transform)


def test_records_that_a_transform_refuses_are_reported_before_the_run(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"prompt": "p", "chosen": "x", "rejected": "x"}] * 3)
    with pytest.raises(InputError, match=r"the first 3 records; line 1: both answers are equal; correct the arguments"):
        stages.transform(tmp_path / "in", tmp_path / "out", run(), transform="preference", on_bad_record="quarantine")


def test_one_file_with_the_keys_is_enough(corpus: Path, tmp_path: Path) -> None:
    write(corpus / "c.jsonl", [{"id": 1}])
    summary = stages.transform(corpus, tmp_path / "out", run(), transform="select(id)")
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts["dropped"] == 40


def test_function_of_a_python_program(corpus: Path, tmp_path: Path) -> None:
    wanted = 7

    def keep(row: Row) -> Row | None:
        if row["n"] == 9:
            raise RejectedRow("nine")
        return row if row["n"] == wanted else None

    options: Row = {"transform": "passthrough", "on_bad_record": "quarantine", "shards": 4}
    cpus = StageRun(Reporter(), processes=2)  # a nested function stays in this process
    summary = stages.transform(corpus, tmp_path / "out", cpus, function=keep, **options)
    assert [row["question"] for shard in shards(tmp_path / "out") for row in shard] == ["a 7?", "b 7?"]
    assert summary.plan.request["transform"].endswith("<locals>.keep")
    assert summary.plan.request["transform_code"]
    wanted = 8
    with pytest.raises(RequestError, match="transform code: "):
        stages.transform(corpus, tmp_path / "out", run(), function=keep, **options)


def test_changed_request_is_refused_and_replaced(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stages.transform(corpus, output, run(), transform="passthrough", shards=3)
    with pytest.raises(RequestError, match=r'transform: "passthrough" -> "select\(n\)"'):
        stages.transform(corpus, output, run(), transform="select(n)", shards=3)
    stages.transform(corpus, output, run(replace=True), transform="select(n)", shards=3)
    assert all(row.keys() == {"n"} for shard in shards(output) for row in shard)


def test_shards_can_be_of_a_part_of_the_workers(corpus: Path, tmp_path: Path) -> None:
    stages.transform(corpus, tmp_path / "expected", run(), transform="passthrough", shards=9)
    for worker in (2, 0, 1):
        stages.transform(corpus, tmp_path / "out", run(worker, 3), transform="passthrough", shards=9)
    assert shards(tmp_path / "out") == shards(tmp_path / "expected")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--transform", "sft("], "Invalid value for --transform: 'sft(' has no ) at its end"),
        (["--transform", "alpaca"], "--transform alpaca: there is no such transform; use sft"),
        (["--transform", "sft", "--set", "instruction=q"], "--transform sft(instruction=q): wrong arguments; use sft("),
        (["--transform", "no_such_module:f"], "importing no_such_module failed (ModuleNotFoundError"),
        (["--transform", "json:no_such"], "json has no no_such; choose one of its functions"),
        (["--transform", "sft", "--shards", "2", "--shard-size", "1MB"], "cannot be combined with --shards"),
        (["--transform", "sft", "--shard-size", "0"], "'0' is not between 1 and 1,152,921"),
        (["--transform", "sft", "--shard-size", "2EB"], "'2EB' is not between 1 and 1,152,921"),
        (["--transform", "select()"], "--transform select: it names no field, so every record would become empty"),
        (["--transform", "rename"], "--transform rename: it names no field, so every record would become empty"),
        (
            ["--transform", "os.path:join"],
            "--transform os.path:join: the function has no source file, so a plan cannot",
        ),
        (["--transform", "sft", "--shard-size", "big"], "'big' is not a size; write it as 256MB"),
        (["--transform", "passthrough", "--shard-size", "100B"], ""),
        (["--transform", "sft", "--compression", "gzip"], "'gzip' is not one of none, zstd"),
        (["--transform", "sft", "--format", "txt"], "'txt' is not one of jsonl, json, parquet, arrow"),
        (["--transform", "sft", "--sample", "3"], "it needs a source such as hf://datasets/ORG/NAME"),
        ([], "Missing option '--transform'"),
    ],
)
def test_wrong_command_exits_with_2(corpus: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    result = run_in_process("transform", corpus, tmp_path / "out", "--processes", 1, *arguments)
    message = " ".join(result.err.replace("\u2502", " ").split())
    assert (result.code, expected if expected in message else message) == (2 if expected else 0, expected)


def test_a_transform_does_not_read_the_output_of_a_transform(corpus: Path, tmp_path: Path) -> None:
    stages.transform(corpus, tmp_path / "out", run(), transform="passthrough")
    with pytest.raises(
        RequestError, match=r"out is an output of tokenmill transform, .*; write one function that makes"
    ):
        stages.transform(tmp_path / "out", tmp_path / "second", run(), transform="passthrough")


def test_too_many_shards_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "a.jsonl", [{"a": 1}])
    with path.open("r+b") as file:
        file.truncate(2 << 20)
    with pytest.raises(RequestError, match="makes 2,097,152 shards, more than 1,000,000; raise --shard-size"):
        stages.transform(tmp_path / "in", tmp_path / "out", run(), transform="passthrough", shard_size=1)


@pytest.mark.slow
def test_changed_function_is_a_changed_plan(corpus: Path, tmp_path: Path, module: Path) -> None:
    command = ["transform", corpus, tmp_path / "out", "--transform", f"{module.stem}:halve", "--shards", 5]
    environment = {"PYTHONPATH": str(module.parent)}
    assert tokenmill(*command, **environment).code == 0
    assert "0 units to run" in tokenmill(*command, **environment).err
    module.write_text(module.read_text().replace("//= 2", "//=  2"))
    result = tokenmill(*command, **environment)
    assert result.code == 2 and "transform code: " in result.err
    assert tokenmill(*command, "--replace", **environment).code == 0


@pytest.mark.slow
def test_preprocess_reads_the_shards_and_finds_the_source(corpus: Path, tmp_path: Path) -> None:
    def is_kept(n: int) -> bool:
        return n * 7919 % 11 < 6

    rows = questions("a", 600)
    write(corpus / "a.jsonl", [row if is_kept(row["n"]) else {"n": row["n"]} for row in rows])
    output = tmp_path / "out"
    command = ["transform", corpus, output, "--transform", "rename", "--set", "text=question", "--shards", 3]
    result = tokenmill(*command, "--compression", "zstd")
    assert result.code == 0 and "tokenmill preprocess" in result.out, result.err
    pairs = tmp_path / "pairs"
    result = tokenmill("preprocess", output, pairs, "--tokenizer", TOKENIZER, "--keys", "text", "--processes", 1)
    assert result.code == 0, result.err
    dataset = find_dataset(pairs)
    assert dataset.manifest.upstream.maker == "transform"
    lineage = [part for shard in range(3) for part in parts(output, f"shard_00000{shard}")[0]]
    assert [(part.source, part.step, bool(part.kept)) for part in lineage] == [
        ("a.jsonl", 2, True),
        ("a.jsonl", 2, True),
        ("b.jsonl", 1, False),
    ]
    kept = [("a.jsonl", n) for first in (0, 1) for n in range(first, 600, 2) if is_kept(n)]
    kept += [("b.jsonl", n) for n in range(10)]
    assert [find_document(dataset, n, key=None, prefix=None).source for n in range(len(kept))] == kept
    status = tokenmill("status", output)
    assert status.code == 0 and "transform" in status.out
    assert tokenmill("verify", output).code == 0


@pytest.mark.slow
def test_damaged_input_of_an_earlier_stage_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n' * 1000))
    stages.extract(source, tmp_path / "extracted", run())
    path = tmp_path / "extracted" / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(InputError, match="is damaged: its hash differs from the one in the manifest of the extract"):
        stages.transform(tmp_path / "extracted", tmp_path / "out", run(), transform="passthrough")


@pytest.mark.slow
def test_shards_of_the_hub_are_streamed(tmp_path: Path) -> None:
    rows = {f"train/{name}.jsonl.zst": questions(name, 20) for name in "abc"}
    with Hub() as hub:
        for_hub = {
            name: zstandard.compress("".join(json.dumps(row) + "\n" for row in value).encode())
            for name, value in rows.items()
        }
        hub.add_dataset(REPOSITORY, for_hub)
        source = f"hf://datasets/{REPOSITORY}"
        local, output, scratch = tmp_path / "corpus", tmp_path / "out", tmp_path / "scratch"
        assert tokenmill("download", source, local, hub=hub).code == 0
        options = ["--transform", "select(n)", "--shards", 5, "--processes", 2]
        assert tokenmill("transform", local, tmp_path / "expected", *options).code == 0
        result = tokenmill("transform", source, output, *options, "--scratch", scratch, hub=hub)
        assert result.code == 0, result.err
    assert shards(output) == shards(tmp_path / "expected")
    for name in (output, tmp_path / "expected"):
        manifest = json.loads((name / ".tokenmill/transform/manifest.json").read_text())
        assert manifest["source"]["uri"] == source
    assert not any(scratch.iterdir())


TOOL_ROWS: list[Row] = [
    {
        "messages": [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        ],
        "tools": [{"name": name, "parameters": {"type": "object", "properties": {key: {} for key in arguments}}}],
        "n": number,
    }
    for number, (name, arguments) in enumerate([("f", {"city": "Lima"}), ("g", {}), ("h", {"day": [1, None]})])
]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_parquet_has_the_same_records(tmp_path: Path, compression: str) -> None:
    rows = [*TOOL_ROWS, {"messages": [{"role": "user", "content": "x"}], "n": 0.5, "answer": "42"}]
    write(tmp_path / "in" / "a.jsonl", rows)
    options = {"transform": "passthrough", "output_format": "parquet", "compression": compression}
    summary = stages.transform(tmp_path / "in", tmp_path / "out", run(), **options)
    (path,) = (tmp_path / "out").glob("shard_*")
    assert path.name == "shard_000000.parquet"
    codec = pq.read_metadata(path).row_group(0).column(0).compression
    assert codec == ("ZSTD" if compression == "zstd" else "UNCOMPRESSED")
    written = pq.read_table(path).to_pylist()
    assert [row["n"] for row in written] == [0, 1, 2, 0.5]
    assert [row["answer"] for row in written] == [None, None, None, "42"]
    for row, expected in zip(written, TOOL_ROWS, strict=False):
        (call,) = row["messages"][1]["tool_calls"]
        assert (
            json.loads(call["function"]["arguments"])
            == (expected["messages"][1]["tool_calls"][0]["function"]["arguments"])
        ), "without the keys of other rows"
        assert json.loads(row["tools"]) == expected["tools"]
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts["out"] == 4
    plain = stages.transform(tmp_path / "in", tmp_path / "plain", run(), transform="passthrough")
    assert parts(tmp_path / "out", "shard_000000") == parts(tmp_path / "plain", "shard_000000")
    assert plain.plan.id != summary.plan.id


def test_parquet_of_many_groups_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.stages.transform.parquet.GROUP_BYTES", 100)
    rows = [{"n": n, f"k{n % 3}": "x" * n} for n in range(50)]
    write(tmp_path / "in" / "a.jsonl", rows)
    stages.transform(
        tmp_path / "in", tmp_path / "out", run(), transform="passthrough", output_format="parquet", shards=2
    )
    read_rows = [
        row for path in sorted((tmp_path / "out").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    kept = [{key: value for key, value in row.items() if value is not None} for row in read_rows]
    assert sorted(kept, key=lambda row: row["n"]) == rows


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"a": 1}, {"a": "x"}], "have no common type"),
        ([{"a": {"b": 1}}, {"a": [1]}], "have no common type"),
        ([{"a": {}}], "'a' contains only empty objects"),
        ([{"a": [{"b": {}}]}], "'a' contains only empty objects"),
        ([{"a": 2**70}], "have no common type"),
        ([{"a": 0.5}, {"a": 2**60 + 1}], "have no common type"),
    ],
)
def test_records_without_a_common_type_are_no_parquet(tmp_path: Path, rows: list[Row], reason: str) -> None:
    write(tmp_path / "in" / "a.jsonl", rows)
    with pytest.raises(InputError) as error:
        stages.transform(tmp_path / "in", tmp_path / "out", run(), transform="passthrough", output_format="parquet")
    assert reason in str(error.value) and "choose --output-format jsonl" in str(error.value)
    assert not list((tmp_path / "out").glob("shard_*"))


PAIR = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}


@pytest.mark.parametrize(
    ("transform", "row", "command"),
    [
        ("dpo", PAIR, "verify"),
        ("preference", PAIR, "verify"),
        ("binary_preference", PAIR, "verify"),
        ("good_answers", PAIR, "chat"),
        ("kto", {"prompt": "Hi", "completion": "Hello!", "label": True}, "verify"),
        ("verl(source=s)", {"prompt": "Hi", "answer": "42"}, "verify"),
        ("nemo_gym", {"messages": [{"role": "user", "content": "Hi"}], "answer": "42"}, "verify"),
        ("sft", {"input": "Hi", "output": "Hello!"}, "chat"),
        ("passthrough", {"text": "once"}, "preprocess"),
        ("passthrough", {"body": "once"}, "verify"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_next_command_can_read_the_rows(tmp_path: Path, transform: str, row: Row, command: str, form: str) -> None:
    write(tmp_path / "in" / "a.jsonl", [row])
    stages.transform(tmp_path / "in", tmp_path / "out", run(), transform=transform, output_format=form)
    assert suggest_next(tmp_path / "out").split()[1] == command


def test_the_command_prints_the_next_command(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", [PAIR])
    ended = tokenmill(
        *("transform", tmp_path / "in", tmp_path / "out", "--transform", "dpo", "--output-format", "parquet"),
        timeout=300,
    )
    assert ended.code == 0, ended.err
    following = ended.out.splitlines()[-1]
    assert following.startswith("next: ") and following.endswith(f"verify {tmp_path / 'out'}")
    assert tokenmill("verify", tmp_path / "out", timeout=300).code == 0


def test_a_shard_without_rows_is_parquet(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", questions("a", 4))
    options: dict[str, Any] = {"output_format": "parquet", "shards": 2, "transform": "passthrough"}
    stages.transform(tmp_path / "in", tmp_path / "out", run(), keep_even, **options)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [table.num_rows for table in tables] == [2, 0]


def keep_even(row: Row) -> Row | None:
    return row if row["n"] % 2 == 0 else None
