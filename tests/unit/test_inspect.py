"""inspect shows which tokens are trained: in colour, between marks, as JSON; data cannot control the terminal."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chat import MARKS, lines, make_tokenizer
from support.commandline import run_on_terminal, tokenmill
from support.corpus import TOKENIZER
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.tokenize.mask_view import MaskedSequence, SequenceDecoder, escape

pytestmark = pytest.mark.slow

HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \r\u202etxt\u2066 \u27e6x\u27e7 \u65e5\u672c \U0001f44d\u200d\U0001f3fd\ttab"
)
ESCAPED = (
    r"\x1b[31mred\x1b]0;title\x07 \x9b2J \x0d\u202etxt\u2066 {}x{} " + "\u65e5\u672c \U0001f44d\u200d\U0001f3fd\ttab"
)
ROWS = [
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {
        "messages": [
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "never trained", "train": False},
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": f"four {HOSTILE}"},
        ]
    },
    # This template removes reasoning from the history, so the row has two sequences.
    {
        "messages": [
            {"role": "user", "content": "five"},
            {"role": "assistant", "content": "six", "reasoning_content": "why"},
            {"role": "user", "content": "seven"},
            {"role": "assistant", "content": "eight", "reasoning_content": "because"},
        ]
    },
]
START, END = MARKS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make outputs of chat and of pack in each format."""
    root = tmp_path_factory.mktemp("inspect")
    make_tokenizer(root / "tokenizer")
    (root / "rows.jsonl").write_bytes(b"\n" + lines(ROWS))
    run("chat", root / "rows.jsonl", root / "chat", "--tokenizer", root / "tokenizer", "--chat-template", "nano3")
    for name in ("parquet", "jsonl", "npy"):
        options = ("--format", name, "--pack-size", 300, "--shards", 2, "--algorithm", "concatenative")
        run("pack", root / "chat", root / "chat" / name, *options)
    run("pack", root / "chat", root / "far" / "away" / "packed", "--pack-size", 512)
    return root


def run(*arguments: Any) -> str:
    result = tokenmill(*arguments)
    assert result.code == 0, result.err
    return result.out


def refusal(*arguments: Any) -> str:
    result = tokenmill("inspect", *arguments)
    assert result.code == 2 and "Traceback" not in result.err
    return result.err


def body(shown: str) -> str:
    """Return the output below the legend."""
    return shown.partition("trained text is")[2].partition("\n")[2]


def test_without_colour_trained_text_is_between_marks(root: Path) -> None:
    shown = run("inspect", root / "chat", "--document", 1, "--mask")
    lines = shown.splitlines()
    assert lines[1] == "from record 1 (counted from 0, blank lines not counted) of rows.jsonl"
    begin, end = "\u27e6", "\u27e7"
    text = ESCAPED.format(r"\u27e6", r"\u27e7")
    assert f"trained text is between {begin} and {end}" in shown
    assert f"{START}user\nthree{END}\n{START}assistant\n<think></think>never trained{END}\n" in shown
    assert f"{START}user\n{text}{END}\n{START}assistant\n<think></think>{begin}four {text}{END}\n{end}\n" in shown
    assert shown.count(begin) - 1 == shown.count(end) - 1 == 1
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}
    # Without --mask, the text is safe, too.
    plain = run("inspect", root / "chat", "--document", 1)
    assert ESCAPED.format(begin, end) in plain and "\x1b" not in plain


def test_on_a_terminal_trained_text_has_a_colour(root: Path) -> None:
    arguments = ("inspect", root / "chat", "--document", 1, "--mask")
    shown = run_on_terminal(*arguments)
    assert shown.code == 0, shown.err
    assert "trained text is green" in shown.out
    text = ESCAPED.format("\u27e6", "\u27e7").replace("\ttab", "")
    assert f"\x1b[30;42mfour {text}" in shown.out
    assert f"\x1b[1;30;42m{END}\x1b[0m\x1b[30;42m\u21b5\x1b[0m\r\n" in shown.out
    assert f"\x1b[1;35m{START}\x1b[0muser\r\nthree\x1b[1;35m{END}\x1b[0m\r\n" in shown.out
    colours = {piece.partition("m")[0] for piece in shown.out.split("\x1b[")[1:]}
    assert colours == {"0", "30;42", "1;30;42", "1;35"}  # the data adds no sequence
    plain = tokenmill(*arguments).out
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert run_on_terminal(*arguments, **environment).out.replace("\r\n", "\n") == plain
    assert "\x1b[30;42m" in tokenmill(*arguments, FORCE_COLOR="1", TERM="xterm").out


def test_json_has_the_ids_and_the_spans(root: Path) -> None:
    event = json.loads(run("inspect", root / "chat", "--document", -1, "--mask", "--json"))
    tokens, mask = (IndexedReader(root / f"chat/rows_{key}_document") for key in ("chat", "mask"))
    assert event["document"] == 2 and event["source"]["record"] == 2
    assert event["tokens"] == tokens.document(2).tolist()
    first, end = tokens.document_indices[2:4].tolist()
    assert len(event["sequences"]) == end - first == 2
    for number, sequence in enumerate(event["sequences"], first):
        assert sequence["tokens"] == tokens.sequence(number).tolist()
        flags = np.zeros(len(sequence["tokens"]), np.uint8)
        for begin, stop in sequence["trained"]:
            flags[begin:stop] = 1
        assert flags.tolist() == mask.sequence(number).tolist()
        assert sequence["trained_tokens"] == flags.sum()
    texts = [[part["text"] for part in s["text"] if part["trained"]] for s in event["sequences"]]
    assert texts == [[f"why\n</think>\nsix{END}\n"], [f"because\n</think>\neight{END}\n"]]
    hostile = json.loads(run("inspect", root / "chat", "--document", 1, "--mask", "--json"))["sequences"][0]["text"]
    assert hostile[-1] == {"text": f"four {HOSTILE}{END}\n", "trained": True}


def test_output_without_a_document_is_summarised(root: Path) -> None:
    shown = run("inspect", root / "chat")
    tokens, mask = (IndexedReader(root / f"chat/rows_{key}_document") for key in ("chat", "mask"))
    assert f"rows_chat_document: 3 documents, {tokens.ids.size:,} tokens" in shown
    assert f"trained: {mask.ids.sum():,} of {tokens.ids.size:,} tokens" in shown and "rows_mask_document" not in shown
    assert json.loads(run("inspect", root / "chat", "--json"))["counts"]["trained"] == mask.ids.sum()
    shown = run("inspect", root / "chat/parquet")
    assert "rows of at most 300 tokens, in the format parquet" in shown and "shard_000000.parquet: 1 rows" in shown
    event = json.loads(run("inspect", root / "chat/parquet", "--json"))
    assert [shard["rows"] for shard in event["shards"]] == [1, 1] and event["pack_size"] == 300


@pytest.mark.parametrize("name", ["parquet", "jsonl"])
def test_packed_row_is_shown_with_the_mask_of_its_own_tokens(root: Path, name: str) -> None:
    output = root / "chat" / name
    tokens, mask = (IndexedReader(root / f"chat/rows_{key}_document") for key in ("chat", "mask"))
    expected = [(tokens.sequence(n).tolist(), mask.sequence(n).tolist()) for n in range(tokens.sequences)]
    sequences, sources = [], []
    for number in (0, 1):
        event = json.loads(run("inspect", output, "--row", number, "--json"))
        assert (event["row"], event["shard"]) == (0, f"shard_00000{number}.{name}")
        for sequence in event["sequences"]:
            flags = np.zeros(len(sequence["tokens"]), np.uint8)
            for begin, stop in sequence["trained"]:
                flags[begin:stop] = 1
            sequences.append((sequence["tokens"], flags.tolist()))
            sources.append((sequence["source"]["file"], sequence["source"]["record"]))
    assert sequences == expected
    assert sources == [("rows.jsonl", record) for record in (0, 1, 2, 2)]
    shown = run("inspect", output, "--row", 0)
    assert f"sequence 0: {len(expected[0][0])} tokens, {sum(expected[0][1])} trained, from record 0 of rows" in shown
    assert "it has 1 where the next token is trained" in shown
    assert f"<think></think>\u27e6two{END}\n\u27e7\n" in shown
    last = run("inspect", output, "--row", -1)
    assert last == run("inspect", output, "--row", 0, "--file", f"shard_000001.{name}") != shown
    coloured = run_on_terminal("inspect", output, "--row", 0, "--mask")
    assert coloured.code == 0 and "\x1b[30;42mtwo" in coloured.out


def test_a_document_of_a_pack_is_refused_with_the_option_for_rows(root: Path) -> None:
    packed = root / "far/away/packed"
    assert "set --row 2 instead of --document" in refusal(packed, "--document", 2, "--mask")


def test_tokenizer_of_a_pack_elsewhere_is_named(root: Path, tmp_path: Path) -> None:
    packed = root / "far/away/packed"
    assert "specify the output that was packed with --tokenizer" in refusal(packed, "--row", 0)
    by_output = run("inspect", packed, "--row", 0, "--tokenizer", root / "chat")
    assert by_output == run("inspect", packed, "--row", 0, "--tokenizer", root / "tokenizer") and "two" in by_output
    for other in (TOKENIZER, tmp_path, tmp_path / "missing"):
        assert f"invalid --tokenizer {other}: the rows have the tokenizer" in refusal(
            packed, "--row", 0, "--tokenizer", other
        )
    sibling = tmp_path / "near" / "packed"
    shutil.copytree(packed, sibling)
    shutil.copytree(root / "chat", tmp_path / "near" / "chat")
    assert "two" in run("inspect", sibling, "--row", 0)


def test_requests_that_cannot_be_shown_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "plain"}\n')
    run("preprocess", tmp_path / "text.jsonl", tmp_path / "out", "--tokenizer", TOKENIZER)
    chat, packed = root / "chat", root / "chat/parquet"
    assert "has no mask" in (error := refusal(tmp_path / "out", "--document", 0, "--mask"))
    assert "run tokenmill chat on conversations" in error
    assert "invalid --document 3: there are 3 documents, counted from 0" in refusal(chat, "--document", 3, "--mask")
    assert "invalid --row 2: there are 2 rows, counted from 0" in refusal(packed, "--row", 2)
    assert "invalid --row -3: there are 2 rows" in refusal(packed, "--row", -3)
    assert "invalid --row 1: there is 1 row, counted" in refusal(
        packed, "--row", 1, "--file", packed / "shard_000000.parquet"
    )
    assert "invalid --file x: the output has shard_000000.parquet, shard_000001.parquet; specify" in refusal(
        packed, "--row", 1, "--file", "x"
    )
    assert "a pickle can run code; run tokenmill pack with --format parquet" in refusal(chat / "npy", "--row", 0)
    assert "there is no output of tokenmill pack" in refusal(tmp_path / "out", "--row", 0)
    assert "choose one of them" in refusal(chat, "--document", 0, "--row", 0)
    assert "add --document" in refusal(chat, "--mask")
    assert "add --row" in refusal(chat, "--document", 0, "--tokenizer", "x")
    assert "remove --key" in refusal(packed, "--row", 0, "--key", "chat")


def change_bytes(path: Path, offset: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)


def test_damaged_data_is_reported(root: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(root / "chat", chat)
    index = (chat / "rows_mask_document.idx").read_bytes()
    lengths = np.frombuffer(index, "<i4", 4, 34) + np.array([1, -1, 0, 0], "<i4")
    change_bytes(chat / "rows_mask_document.idx", 34, lengths.tobytes())
    assert (
        "is not the mask of rows_chat_document: document 0" in (error := refusal(chat, "--document", 0, "--mask"))
        and "run tokenmill verify" in error
    )
    shard = chat / "parquet/shard_000000.parquet"
    row = pq.read_table(shard).slice(0, 1).to_pylist()[0]
    for name, value, problem in (
        ("input_ids", [-1, *row["input_ids"][1:]], "id 0 is -1"),
        ("seq_start_id", [0, 0], "a sequence is empty or outside"),
        ("loss_mask", [1], "its loss_mask has 1 values"),
        ("input_ids", None, "cannot be read"),
    ):
        schema = pq.read_schema(shard)
        table = pa.Table.from_pylist([{**row, name: value}], schema=schema)
        damaged = chat / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(root / "chat/parquet", damaged)
        size = (damaged / "shard_000000.parquet").stat().st_size
        pq.write_table(table, damaged / "shard_000000.parquet")
        accept_size(damaged, size, (damaged / "shard_000000.parquet").stat().st_size)
        assert problem in (error := refusal(damaged, "--row", 0)), error
        assert "run the same tokenmill pack again" in error


def accept_size(output: Path, before: int, after: int) -> None:
    """Record another size of a shard, so that only its content is wrong."""
    for path in (output / ".tokenmill/pack").rglob("*.json"):
        path.write_text(path.read_text().replace(f'"bytes": {before},', f'"bytes": {after},'))


def test_character_across_the_edge_of_a_mask_is_whole(root: Path) -> None:
    decoder = SequenceDecoder(next((root / "chat/.tokenmill/chat/encoders").glob("*/backend.json")))
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(root / "tokenizer/tokenizer.json")).encode("a\U0001f389b").ids
    for edge in range(len(ids) + 1):
        parts = decoder.cut(MaskedSequence(ids, [number >= edge for number in range(len(ids))]))
        assert "".join(part.text for part in parts) == "a\U0001f389b"
    assert decoder.cut(MaskedSequence([], [])) == []


def test_only_unsafe_characters_are_escaped() -> None:
    for safe in ("plain\n\ttext", "\u00e9\u00a0\u3000\u65e5", "\u0645\u06cc\u200c\u062e", "\U0001f468\u200d\U0001f469"):
        assert escape(safe) == safe
    for code in (*range(9), *range(11, 32), *range(127, 160), 0xAD, 0x200B, 0x2028, 0x2029, 0xFEFF, 0xE0041):
        shown = escape(f"a{chr(code)}b")
        assert shown.isprintable() and shown.startswith("a\\") and int(shown[3:-1], 16) == code


def test_a_long_document_is_cut_unless_all_is_requested(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 1000}) + "\n")
    run("preprocess", tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", TOKENIZER)
    start = tokenmill("inspect", tmp_path / "out", "--document", 0).out
    assert start.endswith("... and 3,000 more characters; --all shows them\n") and len(start) < 2500
    assert tokenmill("inspect", tmp_path / "out", "--document", 0, "--all").out.count("word") == 1000
    assert tokenmill("inspect", tmp_path / "out", "--document", 0, "--json").result["text"].count("word") == 1000
