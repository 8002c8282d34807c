"""The stage chat: equal bytes from every input, bad rows by reason and line, and masks that verify checks."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support import stages
from support.chat import conversations, lines, make_tokenizer
from support.commandline import tokenmill
from tokenmill.datasets.dataset import find_dataset, find_document, verify_outputs
from tokenmill.datasets.formats.indexed.mask import check_mask
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.datasets.formats.indexed.writer import IndexedWriter
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.errors import InputError, RequestError
from tokenmill.records.block_kinds import LINES, ReadSettings
from tokenmill.records.parse import parse_records
from tokenmill.records.readers import first_rows
from tokenmill.stages.chat.gate import Row
from tokenmill.stages.chat.stage import limit_work
from tokenmill.stages.registry import CHAT, KINDS
from tokenmill.tokenize.tokenizer import decode

pytestmark = pytest.mark.slow

ROWS = conversations(1, 40)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chatml")


@pytest.fixture(scope="session")
def resolved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Make an output with a resolved tokenizer; copies of it save seconds per test."""
    root = tmp_path_factory.mktemp("resolved")
    (root / "a.jsonl").write_bytes(lines(ROWS[:2]))
    chat(root / "a.jsonl", root / "out", tokenizer)
    return root / "out"


@pytest.fixture
def output(resolved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "out"
    shutil.copytree(resolved / ".tokenmill/chat/encoders", copy / ".tokenmill/chat/encoders")
    shutil.copytree(resolved / "tokenizer", copy / "tokenizer")
    return copy


def chat(source: Path, output: Path, tokenizer: Path, *, replace: bool = False, **options: Any) -> Summary:
    run = StageRun(Reporter(), processes=options.pop("processes", 1), replace=replace)
    fields = {"tokenizer": str(tokenizer), "chat_template": "chatml", **options}
    return stages.chat(source, output, run, **fields)


def counts_of(summary: Summary) -> dict[str, int]:
    assert summary.completion.manifest is not None
    return summary.completion.manifest.counts


def pairs(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("*.[bi][id][nx]")}


def trained_texts(output: Path, name: str) -> list[list[str]]:
    """Return the trained parts of each document as text."""
    tokens, mask = (IndexedReader(output / f"{name}_{key}_document") for key in ("chat", "mask"))
    backend = next((output / ".tokenmill/chat/encoders").glob("*/backend.json"))
    texts = []
    for number in range(tokens.documents):
        ids, trained = tokens.document(number), mask.document(number)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], trained, [0])).astype(np.int8)))
        texts.append([decode(backend, ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)])
    return texts


def test_answers_are_trained_and_nothing_else(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    counts = counts_of(chat(tmp_path / "a.jsonl", output, tokenizer))
    answers = [
        [f"{message['content']}<|im_end|>\n" for message in row["messages"] if message["role"] == "assistant"]
        for row in ROWS
    ]
    assert trained_texts(output, "a") == answers
    tokens, mask = (IndexedReader(output / f"a_{key}_document") for key in ("chat", "mask"))
    assert (counts["in"], counts["out"], counts["rejected"]) == (40, 40, 0)
    assert (counts["tokens"], counts["sequences"]) == (tokens.ids.size, tokens.sequences)
    assert counts["trained"] == int(mask.ids.sum())
    assert mask.dtype == np.uint8 and tokens.dtype == np.uint16
    dataset = find_dataset(output, [CHAT])
    assert [pair.key for pair in dataset.pairs] == ["chat"]
    assert dataset.get_mask_prefix(dataset.pairs[0]) == "a_mask_document"
    assert find_document(dataset, 3, key=None, prefix=None).source == ("a.jsonl", 3)
    assert verify_outputs(output, KINDS, full=True)[1] == []


def as_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    table = pa.Table.from_pylist([{"id": str(number), **row} for number, row in enumerate(rows)])
    pq.write_table(table, path, row_group_size=7)


def write_input(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format of a file's name."""
    data = lines(rows)
    if path.suffix == ".parquet":
        as_parquet(rows, path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, 9)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(data))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.parquet", "a.arrow", "a.json"])
def test_every_format_gives_the_same_bytes(tmp_path: Path, output: Path, tokenizer: Path, name: str) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "other").mkdir()
    write_input(tmp_path / "lines/a.jsonl", ROWS)
    write_input(tmp_path / "other" / name, ROWS)
    reference = Path(shutil.copytree(output, tmp_path / "reference"))
    chat(tmp_path / "lines", reference, tokenizer)
    chat(tmp_path / "other", output, tokenizer, format="json" if name == "a.json" else None)
    assert pairs(output) == pairs(reference)


def test_one_file_uses_all_processes_and_gives_the_same_bytes(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    """Blocks of a large file, more than one for each process; a group of small files shares a block."""
    rows = conversations(2, 6_000)
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    reference = Path(shutil.copytree(output, tmp_path / "reference"))
    chat(tmp_path / "a.jsonl", reference, tokenizer, processes=1)
    chat(tmp_path / "a.jsonl", output, tokenizer, processes=2)
    assert pairs(output) == pairs(reference)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(20):
        (parts / f"{number:02d}.jsonl").write_bytes(lines(rows[300 * number : 300 * number + 300]))
    joined = Path(shutil.copytree(output, tmp_path / "joined", ignore=shutil.ignore_patterns("*_document.*", "plan*")))
    shutil.rmtree(joined / ".tokenmill/chat/receipts")
    chat(parts, joined, tokenizer, replace=True, target_files=1, name="a")
    assert set(pairs(joined)) == {
        f"a-00000-of-00001_{key}_document.{k}" for key in ("chat", "mask") for k in ("bin", "idx")
    }
    assert sorted(pairs(joined).values()) == sorted(pairs(reference).values())


BAD = {
    "invalid_json": b'{"messages": [',
    "no_object": b'["messages"]',
    "no_messages": b'{"text": "a"}',
    "invalid_text": b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
}


@pytest.mark.parametrize("code", BAD)
def test_a_bad_row_names_file_line_and_remedy(tmp_path: Path, output: Path, tokenizer: Path, code: str) -> None:
    good = lines(ROWS[:1])
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + BAD[code] + b"\n" + good)
    with pytest.raises(InputError) as failure:
        chat(tmp_path / "a.jsonl", output, tokenizer)
    message = str(failure.value)
    assert failure.value.exit_code == 2
    assert f"{tmp_path / 'a.jsonl'}, line 3: " in message and "--on-bad-record=quarantine" in message
    assert not list(output.glob("*.bin")) and not list(output.glob(".tokenmill/chat/receipts/*"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_bad_rows_are_quarantined_and_counted_by_reason(
    tmp_path: Path, output: Path, tokenizer: Path, name: str
) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows: list[dict[str, Any]] = [
        {"messages": [user, answer]},
        {"messages": [user]},
        {"messages": [user, answer]},
        {"messages": [{"role": "nobody", "content": "a"}, answer]},
        {"messages": [user]},
        {"messages": [user, answer]},
    ]
    write_input(tmp_path / name, rows)
    summary = chat(tmp_path / name, output, tokenizer, on_bad_record="quarantine")
    counts = counts_of(summary)
    assert (counts["in"], counts["out"], counts["rejected"]) == (6, 3, 3)
    by_reason = {name: count for name, count in counts.items() if name.startswith("rejected.")}
    assert sum(by_reason.values()) == 3 and sorted(by_reason.values()) == [1, 2]
    rejected = [json.loads(line) for line in (output / "rejected/a.jsonl").read_bytes().splitlines()]
    assert [(line["file"], line["line"]) for line in rejected] == [(name, 2), (name, 4), (name, 5)]
    assert all(f"rejected.{line['code']}" in by_reason and line["reason"] for line in rejected)
    assert json.loads(rejected[0]["record"])["messages"] == [user]
    dataset = find_dataset(output, [CHAT])
    assert [find_document(dataset, i, key=None, prefix=None).source for i in range(3)] == [(name, i) for i in (0, 2, 5)]
    assert verify_outputs(output, KINDS, full=True)[1] == []


def test_too_many_bad_rows_end_the_run(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:1]) + 3 * (BAD["no_object"] + b"\n"))
    with pytest.raises(InputError, match="more than 2 bad records"):
        chat(tmp_path / "a.jsonl", output, tokenizer, on_bad_record="quarantine", max_bad_records=2)


def test_nested_texts_of_columnar_files(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    """Dictionary-encoded texts are read; invalid UTF-8 rejects only its row."""
    roles = pa.array(["user", "assistant"] * 3).dictionary_encode()
    contents = pa.array([b"a", b"b", b"a", b"\xff", b"c", b"d"])
    turns = pa.StructArray.from_arrays([roles, contents.view(pa.string())], ["role", "content"])
    table = pa.table({"messages": pa.ListArray.from_arrays([0, 2, 4, 6], turns), "n": [1, 2, 3]})
    (tmp_path / "source").mkdir()
    with pa.OSFile(str(tmp_path / "source/a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 2)
    pq.write_table(table, tmp_path / "source/b.parquet")
    counts = counts_of(chat(tmp_path / "source", output, tokenizer, on_bad_record="quarantine"))
    assert (counts["out"], counts["rejected.invalid_text"]) == (4, 2)
    for name in "ab":
        assert trained_texts(output, name) == [["b<|im_end|>\n"], ["d<|im_end|>\n"]]
        (rejected,) = map(json.loads, (output / f"rejected/{name}.jsonl").read_bytes().splitlines())
        assert rejected["line"] == 2 and "'messages' contains a text that is invalid UTF-8" in rejected["reason"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json"])
def test_oversized_records_are_rejected(tmp_path: Path, output: Path, tokenizer: Path, name: str) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "seven " * 100_000}]}
    write_input(tmp_path / name, [ROWS[0], long, ROWS[1]])
    options = {"on_bad_record": "quarantine", "max_record_size": 100_000}
    if name == "a.json":
        options["format"] = "json"
    counts = counts_of(chat(tmp_path / name, output, tokenizer, **options))
    assert (counts["in"], counts["out"], counts["rejected.too_long"]) == (3, 2, 1)


def test_over_long_rows_are_left_out_and_counted(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "seven " * 1000}]}
    (tmp_path / "a.jsonl").write_bytes(lines([ROWS[0], long, ROWS[1]]))
    counts = counts_of(chat(tmp_path / "a.jsonl", output, tokenizer, max_length=600))
    assert (counts["in"], counts["out"], counts["rejected"], counts["dropped"]) == (3, 2, 0, 1)
    dataset = find_dataset(output, [CHAT])
    assert find_document(dataset, 1, key=None, prefix=None).source == ("a.jsonl", 2)
    with pytest.raises(InputError, match=r"line 2: .*--max-length"):
        chat(tmp_path / "a.jsonl", output, tokenizer, replace=True, max_length=600, over_long="fail")


def test_another_template_is_another_plan(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:5]))
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    template = tmp_path / "own.jinja"
    template.write_text(text)
    chat(tmp_path / "a.jsonl", output, tokenizer, chat_template=str(template))
    before = pairs(output)
    moved = template.rename(tmp_path / "moved.jinja")  # the content identifies a template
    assert chat(tmp_path / "a.jsonl", output, tokenizer, chat_template=str(moved)).done_now == 0
    moved.write_text(text.replace(": ", "\n"))
    with pytest.raises(RequestError, match="--replace"):
        chat(tmp_path / "a.jsonl", output, tokenizer, chat_template=str(moved))
    chat(tmp_path / "a.jsonl", output, tokenizer, chat_template=str(moved), replace=True)
    assert pairs(output) != before
    assert verify_outputs(output, KINDS, full=True)[1] == []


def test_another_built_in_template_is_another_plan(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:3]))
    chat(tmp_path / "a.jsonl", output, tokenizer)
    with pytest.raises(RequestError) as error:
        chat(tmp_path / "a.jsonl", output, tokenizer, chat_template="nano3")
    assert 'chat: {"chat_template": "chatml"} -> {"chat_template": "nano3"}' in str(error.value)


def test_another_tokenizer_is_accepted_after_a_refused_template(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:3]))
    text = "{% for m in messages %}{% if m.role == 'assistant' %}A:{% endif %}{{ m.content }}</s>{% endfor %}"
    text += "{% if add_generation_prompt %}A:{% endif %}"
    first, second = (make_tokenizer(tmp_path / name, template=text) for name in ("first", "second"))
    (second / "tokenizer.json").write_text((second / "tokenizer.json").read_text().replace("<|im_end|>", "</s>"))
    with pytest.raises(RequestError, match="no special token"):
        chat(tmp_path / "a.jsonl", tmp_path / "out", first, chat_template="tokenizer")
    assert chat(tmp_path / "a.jsonl", tmp_path / "out", second, chat_template="tokenizer").done_now == 1


def test_special_tokens_in_messages_give_a_warning(
    tmp_path: Path, output: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "a.jsonl").write_bytes(lines([row]))
    chat(tmp_path / "a.jsonl", output, tokenizer)
    assert "the messages contain special tokens of the tokenizer 1 times" in capsys.readouterr().err


def test_a_copy_of_the_tokenizer_has_its_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template=template)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:5]))
    chat(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, chat_template="tokenizer")
    assert (tmp_path / "out/tokenizer/chat_template.jinja").read_text() == template


def test_text_files_are_refused(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    with pytest.raises(RequestError, match="--format txt"):
        chat(tmp_path / "a.txt", output, tokenizer, format="txt")


def test_a_parquet_file_without_messages_is_refused_at_plan_time(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"the columns are 'text', 'n'.*--messages"):
        chat(tmp_path / "a.parquet", output, tokenizer)
    assert not (output / ".tokenmill/chat/plan.json").exists()


def test_a_file_of_other_content_is_refused_with_its_layout(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[:3], indent=1))
    with pytest.raises(InputError, match=r"one JSON array.*--format json"):
        chat(tmp_path / "a.jsonl", output, tokenizer)


@pytest.fixture
def verified(tmp_path: Path, output: Path, tokenizer: Path) -> Path:
    """Return an output of two units with equal numbers of rows and other texts."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_bytes(lines(conversations(5, 10)))
    (source / "b.jsonl").write_bytes(lines(conversations(6, 10)))
    chat(source, output, tokenizer)
    return output


def problems_of(output: Path) -> list[str]:
    return verify_outputs(output, KINDS, full=True)[1]


def test_verify_reports_swapped_masks(verified: Path) -> None:
    for suffix in ("bin", "idx"):
        first, second = (verified / f"{name}_mask_document.{suffix}" for name in "ab")
        first.rename(verified / "spare")
        second.rename(first)
        (verified / "spare").rename(second)
    problems = problems_of(verified)
    assert any("a_mask_document.idx: it is not the mask of a_chat_document" in problem for problem in problems)
    assert any("b_mask_document.idx: it is not the mask of b_chat_document" in problem for problem in problems)
    assert any("xxh3-128" in problem for problem in problems)


def test_verify_reports_wrong_values_and_untrained_sequences(verified: Path) -> None:
    path = verified / "a_mask_document.bin"
    reader = IndexedReader(verified / "a_mask_document")
    start, length = (int(array[reader.document_indices[4]]) for array in (reader.pointers, reader.lengths))
    values = bytearray(path.read_bytes())
    values[2] = 7
    values[start : start + length] = bytes(length)
    path.write_bytes(values)
    problems = "\n".join(problems_of(verified))
    assert "a_mask_document.bin: token 2 of sequence 0 (document 0) has the value 7, neither 0 nor 1" in problems
    assert (
        "(document 4) is trained" in problems and "run the same tokenmill chat again with --verify-hashes" in problems
    )


def write_pair(prefix: Path, dtype: str, lengths: list[int], documents: list[int], values: Any) -> None:
    with Path(f"{prefix}.bin").open("wb") as file:
        writer = IndexedWriter(file, Path(f"{prefix}.idx"), dtype)
        writer.add(np.array(values, dtype), np.array(lengths, np.int32), np.array(documents))
        with Path(f"{prefix}.idx").open("wb") as index:
            writer.write_index(index)
        writer.discard()


def test_masks_of_another_dataset(tmp_path: Path) -> None:
    tokens, mask = tmp_path / "tokens", tmp_path / "mask"
    write_pair(tokens, "int32", [2, 3], [1, 1], range(5))
    write_pair(mask, "uint8", [2, 3], [1, 1], [0, 1, 0, 0, 1])
    assert check_mask(tokens, mask, full=True) == []
    write_pair(mask, "int32", [2, 3], [1, 1], [0, 1, 0, 0, 1])
    assert "int32, not uint8" in str(check_mask(tokens, mask, full=True)[0])
    write_pair(mask, "uint8", [2, 3], [2], [0, 1, 0, 0, 1])
    assert "it has 1 documents, the tokens 2, and document 0" in str(check_mask(tokens, mask, full=True)[0])
    write_pair(mask, "uint8", [3, 2], [1, 1], [0, 1, 0, 0, 1])
    assert "it has 2 sequences, the tokens 2, and sequence 0" in str(check_mask(tokens, mask, full=True)[0])
    write_pair(mask, "uint8", [2, 3], [1, 1], [2, 1, 0, 0, 3])
    (problem,) = check_mask(tokens, mask, full=True)
    assert "token 0 of sequence 0 (document 0) has the value 2" in str(problem) and "2 such places" in str(problem)
    assert check_mask(tokens, mask, full=False) == []


def test_masks_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.datasets.formats.indexed.mask.BATCH_BYTES", 4)
    tokens, mask = tmp_path / "tokens", tmp_path / "mask"
    lengths = [1, 2, 9, 1, 1, 1, 3]
    values = np.ones(sum(lengths), np.uint8)
    write_pair(tokens, "int32", lengths, [1] * 7, range(sum(lengths)))
    write_pair(mask, "uint8", lengths, [1] * 7, values)
    assert check_mask(tokens, mask, full=True) == []
    values[13] = values[17] = 0
    values[16] = 9
    write_pair(mask, "uint8", lengths, [1] * 7, values)
    texts = list(map(str, check_mask(tokens, mask, full=True)))
    assert "token 1 of sequence 6 (document 6) has the value 9" in texts[0]
    assert "no token of sequence 4 (document 4) is trained" in texts[1] and "such places" not in texts[1]


def test_records_of_lines() -> None:
    data = bytearray(b'\xef\xbb\xbf{"a": 1}\r\n\n \t\n{"a": NaN}\n[1]\n{"b": "\\ud800"}\n{"a": "\\ud800"}\n{"a": 2')
    parsed = parse_records(LINES, data, 0, len(data), ["a.x"], begins_file=True)
    assert [list(row) for row in parsed.rows] == [["a"], ["a"], ["b"]]
    assert [parsed.get_line(number) for number in range(3)] == [1, 4, 6]
    assert [(bad.record, bad.line, bad.code) for bad in parsed.rejected] == [
        (2, 5, "no_object"),
        (4, 7, "invalid_text"),
        (5, 8, "invalid_json"),
    ]
    assert (parsed.blank, parsed.records) == (2, 6)
    assert parsed.describe_rejected(1, "code", "reason") == (1, 4, "reason", b'{"a": NaN}', "code")


def test_first_rows_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * 100 + b'{"a": 1}\n' * 3)
    rows, rejected = first_rows(path, ["a"], 2, 32)
    assert rows == [(101, {"a": 1}), (102, {"a": 1})] and rejected is None
    path.write_bytes(b"\nx\n")
    rows, rejected = first_rows(path, ["a"], 2, 32)
    assert not rows and rejected is not None and (rejected.line, rejected.code) == (2, "invalid_json")
    table = pa.table({"a": [None, [{"x": 1, "y": None}]], "b": [b"\xff", b"b"], "c": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    rows, rejected = first_rows(tmp_path / "a.parquet", ["a", "b", "z"], 5, 1 << 20, settings=ReadSettings())
    assert rows == [(1, {"b": b"\xff"}), (2, {"a": [{"x": 1, "y": None}], "b": b"b"})] and rejected is None


def test_the_command_reports_counts_and_status(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:3]) + BAD["no_object"] + b"\n")
    options = ["--tokenizer", tokenizer, "--chat-template", "chatml", "--on-bad-record", "quarantine"]
    result = tokenmill("chat", tmp_path / "a.jsonl", output, *options)
    assert result.code == 0, result.err
    assert "3 records" in result.out and "tokens trained" in result.out
    assert "1 bad record (1 no_object) kept in" in result.out
    assert "1 bad record (1 no_object) kept in" in tokenmill("status", output).out
    assert tokenmill("verify", output, "--json").result["problems"] == []


def test_the_sample_for_the_gates_is_rendered_in_a_short_time() -> None:
    """Long conversations are few in the sample: the time to render one grows with the square of its messages."""

    def sample(*lengths: int) -> int:
        rows = [Row(f"row {length}", {"messages": [{}] * length, "n": 1}, False) for length in lengths]
        return len(list(limit_work(rows)))

    assert sample(*[16] * 200) == 200
    assert sample(*[100] * 200) == 25
    assert sample(5000, 2) == 1 and sample(2, 5000, 2) == 2 and sample(5000, 5000) == 1 and sample() == 0


def test_rows_with_messages_can_follow_prompts_with_answers(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "q", "completion": "a"}] * 40 + ROWS[:2]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    counts = counts_of(chat(tmp_path / "a.jsonl", output, tokenizer))
    assert counts["out"] == counts["in"] == 42 and counts["answers"] >= 42


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "Tools: {{ tools | tojson }}\n" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "get_time", "description": "Time", "parameters": {}}}]


def named_tokenizer(directory: Path, kind: str, **templates: str) -> Path:
    """Write a tokenizer with named templates in tokenizer_config.json, in chat_template.json, or in files."""
    make_tokenizer(directory)
    if kind == "files":
        (directory / "additional_chat_templates").mkdir()
        for name, source in templates.items():
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (directory / path).write_text(source)
        return directory
    path = directory / kind
    config = json.loads(path.read_bytes()) if path.exists() else {}
    config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", ["tokenizer_config.json", "files"])
def test_rows_with_tools_use_the_template_of_this_name(tmp_path: Path, kind: str) -> None:
    """The texts are those of transformers, with the tokenizer in the output."""
    from transformers import AutoTokenizer

    tokenizer = named_tokenizer(tmp_path / "tok", kind, default=PLAIN, tool_use=WITH_TOOLS, rag="{{ unusable }}")
    messages = [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "It is seven."}]
    rows: list[dict[str, Any]] = [{"messages": messages}, {"messages": messages, "tools": TOOLS}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    chat(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, chat_template="tokenizer")
    tokens = IndexedReader(tmp_path / "out" / "a_chat_document")
    backend = next((tmp_path / "out/.tokenmill/chat/encoders").glob("*/backend.json"))
    copy = AutoTokenizer.from_pretrained(tmp_path / "out/tokenizer")
    for number, row in enumerate(rows):
        expected = copy.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        assert decode(backend, tokens.document(number)) == expected
        assert ("get_time" in expected) == ("tools" in row)


def test_an_unusable_template_for_tools_rejects_only_rows_with_tools(tmp_path: Path) -> None:
    tokenizer = named_tokenizer(tmp_path / "tok", "files", default=PLAIN, tool_use="{{ raise_exception('no') }}")
    rows = [*ROWS, {**ROWS[0], "tools": TOOLS}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    fields = {"chat_template": "tokenizer", "on_bad_record": "quarantine"}
    counts = counts_of(chat(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, **fields))
    assert (counts["out"], counts["rejected"]) == (len(ROWS), 1)
    (rejected,) = (tmp_path / "out/rejected").iterdir()
    assert "the row has tools, and" in rejected.read_text() and "tool_use" in rejected.read_text()
    (tmp_path / "b.jsonl").write_bytes(lines(rows[::-1]))
    with pytest.raises(RequestError, match="the chat template tool_use of tok, line 1: it cannot render"):
        chat(tmp_path / "b.jsonl", tmp_path / "other", tokenizer, chat_template="tokenizer")


def test_a_template_of_a_processor_is_used_and_copied(tmp_path: Path) -> None:
    tokenizer = named_tokenizer(tmp_path / "tok", "chat_template.json", default=PLAIN)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    assert counts_of(chat(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, chat_template="tokenizer"))["out"] == 40
    copy = tmp_path / "out/tokenizer/chat_template.json"
    assert copy.read_bytes() == (tokenizer / "chat_template.json").read_bytes()


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    tokenizer = named_tokenizer(tmp_path / "tok", "tokenizer_config.json", rag=PLAIN, tool_use=WITH_TOOLS)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(RequestError, match="has the chat templates rag, tool_use and none with the name default"):
        chat(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, chat_template="tokenizer")


UNREAD = [
    {**ROWS[0], "source": "web", "note": None},
    {**ROWS[1], "source": "web", "score": 0.5},
    {"messages": [{"role": "user", "content": "a", "mood": "glad"}, {"role": "assistant", "content": "b"}], "note": ""},
]


def test_keys_that_are_not_read_are_printed_with_their_number_of_rows(
    tmp_path: Path, output: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(UNREAD))
    counts = counts_of(chat(tmp_path / "a.jsonl", output, tokenizer))
    assert {name: count for name, count in counts.items() if name.startswith("unread.")} == {
        "unread.n": 2,
        "unread.source": 2,
        "unread.score": 1,
        "unread.messages[].mood": 1,
    }
    expected = "chat: ignoring the keys n (2), source (2), messages[].mood (1), score (1); in parentheses, the number"
    assert expected in capsys.readouterr().err
    chat(tmp_path / "a.jsonl", output, tokenizer)
    assert expected in capsys.readouterr().err, "the numbers are those of the receipts"


def test_columns_that_are_not_read_are_printed(
    tmp_path: Path, output: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_parquet(ROWS, tmp_path / "a.parquet")
    counts = counts_of(chat(tmp_path / "a.parquet", output, tokenizer))
    assert {name: count for name, count in counts.items() if name.startswith("unread.")} == {
        "unread.id": 40,
        "unread.n": 40,
    }
    assert "chat: ignoring the keys id (40), n (40); in parentheses" in capsys.readouterr().err


def test_rows_whose_keys_are_all_read_print_nothing(
    tmp_path: Path, output: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"messages": row["messages"], "tools": []} for row in ROWS[:3]]))
    counts = counts_of(chat(tmp_path / "a.jsonl", output, tokenizer))
    assert not [name for name in counts if name.startswith("unread.")]
    assert "ignoring the keys" not in capsys.readouterr().err


def test_a_receipt_counts_a_limited_number_of_unread_keys(
    tmp_path: Path, output: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": ROWS[0]["messages"], f"key\x1b[2J{number:03d}": 1} for number in range(250)]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    counts = {
        name: n for name, n in counts_of(chat(tmp_path / "a.jsonl", output, tokenizer)).items() if "unread" in name
    }
    assert len(counts) == 101 and counts["unread.(others)"] == 150
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and "key\\x1b[2J000 (1)" in printed and "and 81 more" in printed


def test_preference_data_ends_the_command_with_the_right_one(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    user, good, bad = ({"role": role, "content": role} for role in ("user", "assistant", "assistant"))
    bad = {**bad, "content": "bad"}
    (tmp_path / "dpo.jsonl").write_bytes(lines([{"prompt": [user], "chosen": [good], "rejected": [bad]}]))
    with pytest.raises(RequestError, match="--transform dpo or preference") as failure:
        chat(tmp_path / "dpo.jsonl", output, tokenizer)
    assert failure.value.exit_code == 2
    chat(tmp_path / "dpo.jsonl", output, tokenizer, messages="chosen")
    tokens = IndexedReader(output / "dpo_chat_document")
    backend = next((output / ".tokenmill/chat/encoders").glob("*/backend.json"))
    text = decode(backend, tokens.document(0))
    assert text.startswith("<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\nassistant")
    assert trained_texts(output, "dpo") == [["assistant<|im_end|>\n"]]


def test_bad_answers_of_kto_are_never_trained(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "completion": answer, "label": answer == "b"} for answer in "bc"
    ]
    (tmp_path / "kto.jsonl").write_bytes(lines(rows))
    with pytest.raises(InputError, match=r"line 2: .*'label' is false.*--transform kto"):
        chat(tmp_path / "kto.jsonl", output, tokenizer)
    counts = counts_of(chat(tmp_path / "kto.jsonl", output, tokenizer, replace=True, on_bad_record="quarantine"))
    assert (counts["out"], counts["rejected.preference"]) == (1, 1)
    assert trained_texts(output, "kto") == [["b<|im_end|>\n"]]


def test_rows_with_images_are_rejected_in_every_format(tmp_path: Path, output: Path, tokenizer: Path) -> None:
    image = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "b"}]}
    rows = [{**ROWS[0], "images": None}, {**image, "images": [{"bytes": "x", "path": None}]}]
    source = tmp_path / "source"
    source.mkdir()
    write_input(source / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), source / "b.parquet")
    counts = counts_of(chat(source, output, tokenizer, on_bad_record="quarantine"))
    assert (counts["out"], counts["rejected.content_type"]) == (2, 2)
