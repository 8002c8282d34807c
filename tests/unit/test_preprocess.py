"""Inputs of preprocess: accepted, skipped and counted, quarantined, or refused with file, line and remedy."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from support import stages
from support.corpus import TOKENIZER as TINY
from support.hub import Hub
from tokenmill.datasets.dataset import find_dataset, find_document, verify_outputs
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.contract import EmptyPair
from tokenmill.engine.progress import Reporter
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.errors import InputError, RequestError
from tokenmill.stages.registry import KINDS
from tokenmill.tokenize.tokenizer import decode

pytestmark = pytest.mark.slow

EOD = 0


def preprocess(source: Path, output: Path, *, replace: bool = False, **options: Any) -> Summary:
    run = StageRun(Reporter(), processes=1, replace=replace)
    return stages.preprocess(source, output, run, **{"tokenizer": str(TINY), **options})


@pytest.fixture(scope="session")
def resolved_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an output with a resolved tokenizer and a parity gate result; copies of it save seconds per test."""
    root = tmp_path_factory.mktemp("resolved")
    (root / "a.jsonl").write_text('{"text": "hello"}\n')
    preprocess(root / "a.jsonl", root / "out")
    return root / "out"


@pytest.fixture
def output(resolved_output: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "out"
    shutil.copytree(resolved_output / ".tokenmill/preprocess/encoders", copy / ".tokenmill/preprocess/encoders")
    shutil.copytree(resolved_output / "tokenizer", copy / "tokenizer")
    return copy


def documents(output: Path, prefix: str) -> list[str]:
    """Return every document of a pair as text; check and remove its EOD."""
    reader = IndexedReader(output / prefix)
    backend = next((output / ".tokenmill/preprocess/encoders").glob("*/backend.json"))
    texts = []
    for number in range(reader.documents):
        ids = reader.document(number).tolist()
        assert not ids or ids[-1] == EOD
        texts.append(decode(backend, ids[:-1]))
    return texts


def test_line_ends_marks_and_odd_values_are_read_like_json_loads(tmp_path: Path, output: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "mark"}\r\n',
        b'{"text": "nan", "x": NaN, "y": -Infinity, "z": 1e400}\n',
        b"\n",
        b" \t\r\n",
        b'{"text": "nul\\u0000"}\n',
        b'{"text": "odd", "other": "\\ud800"}\n',
        b'{"text": "first", "text": "last"}\n',
        b'{"text": ""}\n',
        b'{"text": "no newline"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    summary = preprocess(tmp_path / "a.jsonl", output)
    assert documents(output, "a_text_document") == ["mark", "nan", "nul\0", "odd", "last", "", "no newline"]
    assert summary.completion.manifest is not None
    counts = summary.completion.manifest.counts
    assert (counts["in"], counts["out"], counts["rejected"], counts["blank"]) == (7, 7, 0, 2)


def test_a_list_of_texts_is_a_sequence_each_with_eod_on_the_last(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ["one", "", "two"]}\n{"text": []}\n{"text": "three"}\n')
    preprocess(tmp_path / "a.jsonl", output)
    reader = IndexedReader(output / "a_text_document")
    assert reader.document_indices.tolist() == [0, 2, 2, 3]
    assert [reader.sequence(i).tolist()[-1] == EOD for i in range(3)] == [False, True, True]


BAD = {
    "invalid JSON": b'{"text": "a"',
    "raw NUL": b'{"text": "a\0b"}',
    "invalid UTF-8": b'{"text": "\xff"}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "missing key": b'{"txt": "a"}',
    "null": b'{"text": null}',
    "number": b'{"text": 5}',
    "no object": b'["text"]',
    "list with a number": b'{"text": ["a", 1]}',
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_names_file_line_and_remedy(tmp_path: Path, output: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + BAD[kind] + b'\n{"text": "after"}\n')
    with pytest.raises(InputError) as failure:
        preprocess(tmp_path / "a.jsonl", output)
    message = str(failure.value)
    assert failure.value.exit_code == 2
    assert str(tmp_path / "a.jsonl") in message and "line 3" in message and "--on-bad-record=quarantine" in message
    assert not list(output.glob("*.bin")) and not list(output.glob(".tokenmill/preprocess/receipts/*"))


KEEP = (
    "Correct or quarantine the record: use --on-bad-record=quarantine (in a chart: --set onBadRecord=quarantine), or "
)


def download(source: str, output: Path, *, replace: bool = False, endpoint: str | None = None) -> Summary:
    run = StageRun(Reporter(), processes=1, replace=replace)
    options: dict[str, Any] = {"connections": 2, "endpoint": endpoint, "deadline": 30, "stall_seconds": 5}
    return stages.download(source, output, run, Selection(), **options)


def test_a_bad_record_of_an_earlier_stages_file_is_corrected_at_the_source(tmp_path: Path, output: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "corpus"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "0"}\n')
    (source / "b.jsonl").write_text('\n{"text": "1"}\n{"text": "2"\n')

    def all_stages(*, replace: bool = False) -> Summary:
        download(str(source), root, replace=replace)
        run = StageRun(Reporter(), processes=1, replace=replace)
        stages.concatenate(root, root / "joined", run, target_files=1, name="part")
        return preprocess(root, output)

    with pytest.raises(InputError) as failure:
        all_stages()
    joined = root / "joined/part-00000-of-00001.jsonl"
    assert str(failure.value) == (
        f"{joined}, line 4: invalid JSON at column 13 (Expecting ',' delimiter); each line must contain one record. "
        f"{KEEP}"
        "correct it in b.jsonl of file:source, record 1 counted from 0 without blank lines; run the stages from there "
        "up to tokenmill concatenate again with --replace (in a chart: --set replace=true), and then this command."
    )
    (source / "b.jsonl").write_text('\n{"text": "1"}\n{"text": "corrected"}\n')
    all_stages(replace=True)
    assert documents(output, "part-00000-of-00001_text_document") == ["0", "1", "corrected"]


def test_a_bad_record_of_the_hub_is_corrected_in_a_new_commit(tmp_path: Path, output: Path) -> None:
    with Hub() as hub:
        hub.add_dataset("org/bad", {"a.jsonl": b'{"text": "fine"}\n{}\n'})
        download("hf://datasets/org/bad", tmp_path / "corpus", endpoint=hub.endpoint)
    with pytest.raises(InputError) as failure:
        preprocess(tmp_path / "corpus", output)
    assert str(failure.value).endswith(
        f". {KEEP}correct it in a.jsonl of hf://datasets/org/bad, record 1 counted from 0 without blank lines; run "
        "tokenmill download again with --replace (in a chart: --set replace=true) and the new "
        "commit as --revision, and then this command."
    )
    preprocess(tmp_path / "corpus", output, on_bad_record="quarantine")
    assert documents(output, "a_text_document") == ["fine"]


def test_bad_records_are_quarantined_and_finished_units_stay(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    bad = list(BAD.values())
    (source / "a.jsonl").write_text('{"text": "whole"}\n')
    (source / "b.jsonl").write_bytes(b"\n".join([b'{"text": "0"}', *bad, b'{"text": "1"}']))
    with pytest.raises(InputError):
        preprocess(source, output)
    assert (output / "a_text_document.bin").exists(), "a bad input must not stop the others"
    summary = preprocess(source, output, on_bad_record="quarantine")
    assert (summary.done_before, summary.done_now) == (1, 1)
    assert documents(output, "b_text_document") == ["0", "1"]
    kept = [json.loads(line) for line in (output / "rejected/b.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in kept] == list(range(2, 2 + len(bad)))
    assert {entry["file"] for entry in kept} == {"b.jsonl"}
    assert kept[0]["record"] == bad[0].decode() and "record_base64" in kept[2]
    assert summary.completion.manifest is not None
    counts = summary.completion.manifest.counts
    assert counts["in"] == counts["out"] + counts["rejected"] == 3 + len(bad)
    # The second document of b is the record after the bad records, and its source is that record.
    document = find_document(find_dataset(output), 1, key=None, prefix="b_text_document")
    assert document.source == ("b.jsonl", 1 + len(bad))


def test_the_limit_of_bad_records(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "{}\n" * 4)
    with pytest.raises(InputError, match=r"more than 3 bad records.*a\.jsonl, line 5.*--max-bad-records"):
        preprocess(tmp_path / "a.jsonl", output, on_bad_record="quarantine", max_bad_records=3)
    preprocess(tmp_path / "a.jsonl", output, on_bad_record="quarantine", max_bad_records=4)


@pytest.mark.parametrize("form", ["zst cut", "zst flipped", "gz cut", "gz flipped"])
def test_damaged_compressed_input_is_refused_with_file_and_offset(tmp_path: Path, output: Path, form: str) -> None:
    plain = "".join(json.dumps({"text": f"line {i} " * 20}) + "\n" for i in range(3000)).encode()
    kind, damage = form.split()
    data = bytearray(
        zstandard.ZstdCompressor(write_checksum=True).compress(plain) if kind == "zst" else gzip.compress(plain)
    )
    if damage == "cut":
        del data[-7:]
    else:
        data[len(data) // 2] ^= 0x10
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.jsonl\.(zst|gz).*(offset|byte) [\d,]+"):
        preprocess(path, output, on_bad_record="quarantine")
    assert not list(output.glob("*.bin"))


def test_a_damaged_first_file_fails_only_its_unit(tmp_path: Path, output: Path) -> None:
    source, intact = tmp_path / "in", gzip.compress(b'{"text": "a"}\n')
    source.mkdir()
    for name in "abc":
        (source / f"{name}.jsonl.gz").write_bytes(intact)
    (source / "a.jsonl.gz").write_bytes(intact[:-4])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz.*truncated"):
        preprocess(source, output)
    assert documents(output, "b_text_document") == documents(output, "c_text_document") == ["a"]
    (source / "a.jsonl.gz").write_bytes(intact)
    summary = preprocess(source, output)
    assert (summary.done_now, summary.done_before) == (1, 2) and summary.completion.manifest is not None


def test_a_missing_first_file_of_an_earlier_stage_fails_only_its_unit(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.jsonl").write_text('{"text": "a"}\n')
    stages.extract(source, tmp_path / "extracted", StageRun(Reporter(), processes=1))
    (tmp_path / "extracted/a.jsonl").unlink()
    with pytest.raises(InputError, match=r"a\.jsonl is missing.*run tokenmill extract again"):
        preprocess(tmp_path / "extracted", output)
    stages.extract(source, tmp_path / "extracted", StageRun(Reporter(), processes=1))
    summary = preprocess(tmp_path / "extracted", output)
    assert (summary.done_now, summary.done_before) == (1, 2) and summary.completion.manifest is not None


def test_a_corpus_without_documents_is_refused(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(RequestError, match="made no tokens"):
        preprocess(tmp_path, output)
    assert not (output / ".tokenmill/preprocess/manifest.json").exists()


def test_an_output_without_tokens_is_recorded_and_omitted(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    (source / "b.jsonl").write_text('{"text": "b"}\n')
    preprocess(source, output)
    dataset = find_dataset(output)
    assert [pair.prefix for pair in dataset.pairs] == ["b_text_document"]
    assert dataset.manifest.empty == [EmptyPair("text", "a_text_document", 2)]
    assert sorted(path.name for path in output.glob("[!.]*.*")) == ["b_text_document.bin", "b_text_document.idx"]


def test_no_data_is_refused(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "README.md").write_text("hello")
    with pytest.raises(RequestError, match=r"no data files in .*README\.md.*\.jsonl"):
        preprocess(source, output)
    with pytest.raises(RequestError, match="does not exist"):
        preprocess(tmp_path / "absent", output)


def test_an_absent_key_is_refused_even_with_quarantine(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "meta": {"text": "nested"}}\n' * 3)
    with pytest.raises(RequestError, match=r"none of the first 3 records.*meta\.txt"):
        preprocess(tmp_path / "a.jsonl", output, keys="meta.txt", on_bad_record="quarantine")
    preprocess(tmp_path / "a.jsonl", output, keys="meta.text")
    assert documents(output, "a_meta.text_document") == ["nested"] * 3


def test_a_parquet_without_the_column_is_refused(tmp_path: Path, output: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"a\.parquet.*text.*content"):
        preprocess(tmp_path / "a.parquet", output)
    with pytest.raises(InputError, match=r"a\.parquet.*row 2"):
        preprocess(tmp_path / "a.parquet", output, keys="content")


def test_a_missing_eod_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tok"
    shutil.copytree(TINY, tokenizer)
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(RequestError, match=r"eos.*--eod-token.*<\|endoftext\|>"):
        preprocess(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tokenizer))
    preprocess(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tokenizer), append_eod=False)
    assert IndexedReader(tmp_path / "out/a_text_document").document(0).tolist()[-1] != EOD


def test_a_very_long_line_works(tmp_path: Path, output: Path) -> None:
    text = "lorem ipsum dolor " * 600_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "b"}\n')
    preprocess(tmp_path / "a.jsonl", output)
    assert documents(output, "a_text_document") == [text, "b"]


def test_many_inputs_into_few_outputs_keep_their_order_and_origin(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    dice = np.random.default_rng(0)
    for i in range(12):
        lines = [json.dumps({"text": f"file {i} line {j}"}) for j in range(int(dice.integers(0, 40)))]
        (source / f"{i:02d}.jsonl.zst").write_bytes(zstandard.compress("".join(f"{x}\n" for x in lines).encode()))
    preprocess(source, output, target_files=3)
    dataset = find_dataset(output)
    assert len(dataset.pairs) == 3
    texts = [text for pair in dataset.pairs for text in documents(output, pair.prefix)]
    assert texts == sorted(texts, key=lambda t: (int(t.split()[1]), int(t.split()[3])))
    for number, text in enumerate(texts):
        _, file, _, line = text.split()
        document = find_document(dataset, number, key=None, prefix=None)
        assert document.source == (f"{int(file):02d}.jsonl.zst", int(line))
    with pytest.raises(RequestError, match="--target-files 13 is more than the 12"):
        preprocess(source, tmp_path / "other", target_files=13)


def test_the_tokenizer_in_the_output_is_the_one_of_the_data(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    preprocess(tmp_path / "a.jsonl", output)
    shutil.copytree(TINY, tmp_path / "other")
    config = tmp_path / "other/tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"model_max_length": 77}))
    (output / "new-00000-of-00001_text_document.bin").write_text("a stranger's")
    with pytest.raises(RequestError, match="no record shows"):
        preprocess(
            tmp_path / "a.jsonl", output, tokenizer=str(tmp_path / "other"), target_files=1, name="new", replace=True
        )
    assert verify_outputs(output, KINDS, full=True)[1] == []

    (output / "tokenizer/tokenizer.json").unlink()
    (output / "tokenizer/tokenizer_config.json").write_text("{}")
    assert len(verify_outputs(output, KINDS, full=True)[1]) == 2
    preprocess(tmp_path / "a.jsonl", output)
    assert verify_outputs(output, KINDS, full=True)[1] == []


def test_a_foreign_file_is_not_overwritten(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (output / "a_text_document.bin").write_bytes(b"mine")
    with pytest.raises(RequestError, match=r"a_text_document\.bin exists, and no record shows"):
        preprocess(tmp_path / "a.jsonl", output)
    assert (output / "a_text_document.bin").read_bytes() == b"mine"


def test_two_inputs_with_the_same_output_name_are_refused(tmp_path: Path, output: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("wiki", "wiki_en"):
        (corpus / f"{name}.jsonl").write_text('{"text": "one", "en_text": "two and three"}\n')
    with pytest.raises(RequestError, match=r"both write wiki_en_text_document\.bin; pass --target-files 2"):
        preprocess(corpus, output, keys="text,en_text")
    assert preprocess(corpus, output, keys="text,en_text", target_files=2).completion.manifest is not None


@pytest.mark.parametrize("wrong", [{"name": "../../x"}, {"name": "a/b"}, {"name": ""}, {"keys": "../../x"}])
def test_an_invalid_part_of_a_file_name_is_refused(tmp_path: Path, output: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "../../x": "two"}\n')
    with pytest.raises(RequestError, match=r"--name|--keys"):
        preprocess(tmp_path / "a.jsonl", output, target_files=1, **wrong)
    assert not (output / ".tokenmill/preprocess/plan.json").exists()


SPECIAL_LINES = [
    b'{"text": "none"}\n',
    b"\n",
    b'{"text": 5}\n',
    b'{"text": "a \\u003c|endoftext|> b<|endoftext|>"}\n',
    b'{"text": ["fine", "<|endoftext|>"]}\n',
    b'{"text": "<|endoftext", "title": "<|endoftext|>"}\n',
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_special_tokens_in_the_text_are_counted_or_refused(
    tmp_path: Path, output: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if form == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(b"".join(SPECIAL_LINES))
    else:
        texts = ["none", None, "a <|endoftext|> b<|endoftext|>", "fine<|endoftext|>", "<|endoftext"]
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    source = tmp_path / f"a.{form}"
    place = "line 4" if form == "jsonl" else "row 3"
    with pytest.raises(InputError) as failure:
        preprocess(source, output, special_in_text="fail", on_bad_record="quarantine")
    assert f"{source}, {place}: the text contains the special token '<|endoftext|>'" in str(failure.value)

    capsys.readouterr()
    summary = preprocess(source, output, on_bad_record="quarantine")
    assert summary.completion.manifest is not None
    assert summary.completion.manifest.counts["special_in_text"] == 3
    ids = IndexedReader(output / "a_text_document").document(1).tolist()
    assert ids.count(EOD) == 3


def test_special_tokens_in_the_text_can_be_text(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "<|endoftext|> x"}\n')
    summary = preprocess(tmp_path / "a.jsonl", output, special_in_text="split")
    assert summary.completion.manifest is not None
    assert "special_in_text" not in summary.completion.manifest.counts
    assert IndexedReader(output / "a_text_document").document(0).tolist().count(EOD) == 1
    assert documents(output, "a_text_document") == ["<|endoftext|> x"]


def test_without_special_tokens_there_is_no_count(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "<|endoftext| <tag> |endoftext|>"}\n')
    summary = preprocess(tmp_path / "a.jsonl", output, special_in_text="fail")
    assert summary.completion.manifest is not None
    assert "special_in_text" not in summary.completion.manifest.counts


FORMATS: dict[str, tuple[dict[str, str], str, bytes, list[str]]] = {
    "jsonl": ({"format": "jsonl"}, "AA/wiki_00", b'{"text": "0"}\n\n{"text": "1"}\n', ["0", "1"]),
    "json": ({"format": "json"}, "a.json.gz", gzip.compress(b'[{"text": "0"},\n{"text": "1"}]'), ["0", "1"]),
    "txt": ({"format": "txt"}, "b.txt", b"a book\n\nof two lines\n", ["a book\n\nof two lines\n"]),
    "txt lines": ({"format": "txt", "txt_document": "line"}, "b.txt.zst", zstandard.compress(b"0\r\n\n1"), ["0", "1"]),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_format_is_read_under_any_name_and_traced(tmp_path: Path, output: Path, case: str) -> None:
    reading, name, data, texts = FORMATS[case]
    for folder in ("in", "in/more"):
        (tmp_path / folder / name).parent.mkdir(parents=True)
        (tmp_path / folder / name).write_bytes(data)
    (tmp_path / "in/README.md").write_text("no data")
    summary = preprocess(tmp_path / "in", output, **reading, target_files=1)
    assert documents(output, "part-00000-of-00001_text_document") == texts * 2
    for number in range(2 * len(texts)):
        document = find_document(find_dataset(output), number, key=None, prefix="part-00000-of-00001_text_document")
        folder, record = ("", "more/")[number // len(texts)], number % len(texts)
        assert document.source == (f"{folder}{name}", record)
    assert summary.plan.request["format"] == summary.plan.basis["format"] == reading["format"]
    assert ("txt_document" in summary.plan.request) == (reading["format"] == "txt")
    with pytest.raises(RequestError, match=r"made with other parameters(.|\n)*format: "):
        preprocess(tmp_path / "in", output, format="jsonl" if reading["format"] == "json" else "json")


def test_a_stray_file_before_the_data_can_be_excluded(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.json").write_text('{"n": 1}')
    (source / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(InputError, match=r"a\.json: .*no key 'text'.* leave it out with --exclude"):
        preprocess(source, output)
    preprocess(source, output, selection=Selection(exclude=("a.json",)))
    assert documents(output, "b_text_document") == ["b"]


def test_a_format_works_with_a_selection(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "in"
    for name in ("train/wiki_00", "train/more/wiki_01", "test/wiki_00"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f'{{"text": "{name}"}}\n')
    (source / "train/wiki_00.zst").write_bytes(zstandard.compress((source / "train/wiki_00").read_bytes()))
    (source / "train/cover.png").write_bytes(b"\x89PNG")
    lines = {"format": "jsonl"}
    with pytest.raises(RequestError, match=r"wiki_00 and train/wiki_00\.zst in .* are two forms of one text"):
        preprocess(source, output, **lines)
    for selection, texts in {
        Selection(prefer="compressed"): ["train/more/wiki_01", "train/wiki_00"],
        Selection(split="test"): ["test/wiki_00"],
        Selection(include=("train/*",), exclude=("*.png", "*_00*")): ["train/more/wiki_01"],
    }.items():
        preprocess(source, output, **lines, selection=selection, target_files=1, replace=True)
        assert documents(output, "part-00000-of-00001_text_document") == texts
    preprocess(source / "test/wiki_00", output, **lines, replace=True)
    assert documents(output, "wiki_00_text_document") == ["test/wiki_00"]


def test_special_tokens_count_in_every_format(tmp_path: Path, output: Path) -> None:
    for reading, data, place in (
        ({"format": "txt"}, "a\n<|endoftext|>", "record 1"),
        ({"format": "txt", "txt_document": "line"}, "a\n\n<|endoftext|>", "line 3"),
        ({"format": "json"}, '[{"text": "a"}, {"text": "<|endoftext|>"}]', "record 2"),
    ):
        (tmp_path / "a").write_text(data)
        with pytest.raises(InputError, match=f"{place}: the text contains the special token"):
            preprocess(tmp_path / "a", output, **reading, special_in_text="fail", replace=True)


def test_a_plan_without_a_format_is_unchanged(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    plan = preprocess(tmp_path / "a.jsonl", output).plan
    assert not {"format", "txt_document"} & {*plan.request, *plan.basis}


def test_a_saved_datasets_directory_is_read(tmp_path: Path, output: Path) -> None:
    import pyarrow as pa

    source = tmp_path / "in"
    source.mkdir()
    table = pa.table({"text": [f"row {number}" for number in range(6)], "n": range(6)})
    for number in range(2):
        name = f"{source}/data-{number:05d}-of-00002.arrow"
        with pa.ipc.new_stream(name, table.schema) as stream:
            stream.write_table(table.slice(3 * number, 3), max_chunksize=2)
    for name in ("state.json", "dataset_info.json"):
        (source / name).write_text('{"features": {}}')
    preprocess(source, output, target_files=1)
    assert documents(output, "part-00000-of-00001_text_document") == table["text"].to_pylist()
    document = find_document(find_dataset(output), 4, key=None, prefix="part-00000-of-00001_text_document")
    assert document.source == ("data-00001-of-00002.arrow", 1)


def test_an_arrow_file_that_was_changed_after_its_download_is_refused(tmp_path: Path, output: Path) -> None:
    import pyarrow as pa

    table = pa.table({"text": ["first", "second"]})
    (tmp_path / "in").mkdir()
    with pa.ipc.new_file(f"{tmp_path}/in/a.arrow", table.schema) as writer:
        writer.write_table(table)
    download(str(tmp_path / "in"), tmp_path / "corpus")
    path = tmp_path / "corpus/a.arrow"
    path.write_bytes(path.read_bytes().replace(b"second", b"sEcond"))
    with pytest.raises(InputError, match="its hash differs from the one in the manifest"):
        preprocess(tmp_path / "corpus", output)


@pytest.mark.parametrize("on_bad_record", ["fail", "quarantine"])
def test_wrong_content_fails_only_its_unit(tmp_path: Path, output: Path, on_bad_record: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")
    (source / "b.jsonl").write_text('{"text": "b"}\n')
    (source / "c.json").write_text('[\n{"text": "c"},\n{"text": "d"}\n]\n')
    with pytest.raises(
        RequestError,
        match=r"2 of 3 units(.|\n)*a.jsonl: the file contains a Git LFS pointer (.|\n)*c.json: the content is one JSON",
    ):
        preprocess(source, output, on_bad_record=on_bad_record)
    assert [path.name for path in output.glob("*.bin")] == ["b_text_document.bin"]
    with pytest.raises(InputError, match=r"a\.jsonl: the file contains a Git LFS pointer .* `git lfs pull`"):
        preprocess(source / "a.jsonl", tmp_path / "other", on_bad_record=on_bad_record)


def test_the_content_of_a_named_file_decides(tmp_path: Path, output: Path) -> None:
    (tmp_path / "RC_2020-01.zst").write_bytes(zstandard.compress(b'{"text": "a"}\n'))
    preprocess(tmp_path / "RC_2020-01.zst", output)
    assert documents(output, "RC_2020-01_text_document") == ["a"]
    (tmp_path / "book.txt").write_text("Once upon a time\n")
    with pytest.raises(InputError, match=r"book\.txt: none of .* line 1: .*--format txt .*--txt-document=line"):
        preprocess(tmp_path / "book.txt", tmp_path / "other")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(
        InputError, match=r"chat\.jsonl: .*'messages' contains chat data, which preprocess does not support"
    ):
        preprocess(tmp_path / "chat.jsonl", tmp_path / "other")


def test_a_record_that_is_too_long_is_quarantined(tmp_path: Path, output: Path) -> None:
    long_record = json.dumps({"text": "x" * 4_000_000})
    (tmp_path / "a.jsonl").write_text(f'{{"text": "0"}}\n\n{long_record}\n{{"text": "1"}}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 3: record of 4,000,012 bytes: .*--max-record-size"):
        preprocess(tmp_path / "a.jsonl", output, max_record_size=2_000_000)
    preprocess(tmp_path / "a.jsonl", output, max_record_size=2_000_000, on_bad_record="quarantine")
    assert documents(output, "a_text_document") == ["0", "1"]
    (kept,) = [json.loads(entry) for entry in (output / "rejected/a.jsonl").read_text().splitlines()]
    assert kept["line"] == 3 and long_record.startswith(kept["record"])
    document = find_document(find_dataset(output), 1, key=None, prefix="a_text_document")
    assert document.source == ("a.jsonl", 2)


def test_stages_that_copy_lines_require_lines(tmp_path: Path, output: Path) -> None:
    source, quiet = tmp_path / "in", StageRun(Reporter(), processes=1)
    source.mkdir()
    (source / "wiki_00").write_text('{"text": "a"}\n')
    (source / "wiki_01").write_bytes(gzip.compress(b'{"text": "b"}'))
    stages.extract(source, tmp_path / "extracted", quiet, format="jsonl")
    assert [path.name for path in sorted((tmp_path / "extracted").glob("w*"))] == ["wiki_00.jsonl", "wiki_01.jsonl"]
    preprocess(tmp_path / "extracted", output, target_files=1)
    assert documents(output, "part-00000-of-00001_text_document") == ["a", "b"]
    with pytest.raises(RequestError, match=r"--format json: extract treated each line .*--from download"):
        preprocess(tmp_path / "extracted", output, format="json")
    with pytest.raises(InputError, match=r"wiki_01: its content is gz data, .*tokenmill extract"):
        stages.concatenate(source, tmp_path / "joined", quiet, target_files=1, name="part", format="jsonl")
    (source / "wiki_01").write_text("<html>login</html>")
    for stage in (stages.extract, stages.concatenate):
        options = {} if stage is stages.extract else {"target_files": 1, "name": "part"}
        with pytest.raises(InputError, match=r"wiki_01: the file contains an HTML page"):
            stage(source, tmp_path / stage.__name__, quiet, format="jsonl", **options)
        for spread in ('[\n{"text": "a"}\n]', '[{"text": "a"},\n{"text": "b"}]', '\n{\n "text": "a"\n}'):
            (tmp_path / "a.json").write_text(spread)
            with pytest.raises(
                InputError, match=r"a\.json: the content is .*, not one record per line, .* preprocess --format json"
            ):
                stage(
                    tmp_path / "a.json", tmp_path / f"{stage.__name__} alone", quiet._replace(replace=True), **options
                )
    with pytest.raises(RequestError, match=r"--keys text,title: text files have no keys"):
        preprocess(source, tmp_path / "other", format="txt", keys="text,title")
