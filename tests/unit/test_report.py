"""`tokenmill report` about outputs of stages: its numbers equal those counted here on the corpus, without its code."""

import json
import os
import random
import re
import shutil
import unicodedata
from collections import Counter, defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from support import run_files, stages
from support.browser import Page
from support.chat import conversations, lines, make_tokenizer
from support.commandline import run_in_process, tokenmill
from support.corpus import TOKENIZER
from tokenmill.core.printing import format_bytes
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun
from tokenmill.reports.contract import RunAttempt, RunReport, SavedCheckpoint
from tokenmill.reports.opening import make_opening
from tokenmill.reports.scripts import COMMON, OTHER, find_main_script
from tokenmill.samples.run_record import write_record

SECRET = "hf_plantedQwZxkTyRbNmVcLsDgHjPfA"
HOSTILE = "</script><img src=x onerror=alert(1)><!-- "
EOD = 0
SEQ_LENGTH = 64
WORDS = {
    "en": "the of model data token page river stone",
    "ru": "\u0438 \u0432 \u043d\u0430 \u043c\u043e\u0434\u0435\u043b\u044c \u0434\u0430\u043d\u043d\u044b\u0435",
    "zh": "\u7684 \u4e00 \u662f \u6570\u636e \u6a21\u578b",
    "web/th": "\u0e41\u0e25\u0e30 \u0e43\u0e19 \u0e17\u0e35\u0e48",
}
SCRIPTS = {"LATIN": "Latin", "CYRILLIC": "Cyrillic", "CJK": "Han", "THAI": "Thai"}
"""The first word of the Unicode name of a letter, and the script in a report."""


class Corpus(NamedTuple):
    """A corpus, the output of preprocess, and the accepted texts of each source file."""

    output: Path
    texts: dict[str, list[str]]
    tokenizer: Tokenizer

    @property
    def all_texts(self) -> list[str]:
        """Return the texts of all files."""
        return [text for texts in self.texts.values() for text in texts]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a document; an empty text has no EOD."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, EOD] if ids else []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Make a dataset of several sources and scripts, with duplicates, an empty document and rejected records."""
    root = tmp_path_factory.mktemp("report")
    dice = random.Random(7)
    texts: dict[str, list[str]] = {}
    for name, words in WORDS.items():
        documents = [" ".join(dice.choices(words.split(), k=dice.randint(1, 60))) for _ in range(40)]
        texts[f"{name}.jsonl"] = [*documents, *documents[:5], documents[3], documents[3]]
    texts["en.jsonl"] += ["", "1234 5678 !?", f"{HOSTILE}{SECRET} {HOSTILE * 60}", f"a document with {SECRET}"]
    (root / "corpus").mkdir()
    for name, documents in texts.items():
        records = [json.dumps({"text": text}) for text in documents]
        if name == "ru.jsonl":
            records[3:3] = ['{"text": 5}', json.dumps({SECRET: SECRET}), f'{{"text": "{SECRET}', '{"text": 7}']
        (root / "corpus" / name).parent.mkdir(exist_ok=True)
        (root / "corpus" / name).write_text("\n".join(records) + "\n")
    run = StageRun(Reporter(), processes=1)
    stages.extract(root / "corpus", root / "extracted", run)
    output = root / "extracted" / "preprocessed"
    stages.preprocess(root / "extracted", output, run, tokenizer=str(TOKENIZER), on_bad_record="quarantine")
    return Corpus(output, texts, Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")))


def report(*arguments: object) -> Any:
    """Return the JSON of a report."""
    ended = run_in_process("report", *arguments, "--json")
    assert ended.code == 0, ended.err
    return ended.result


def find_script(text: str) -> str:
    """Return the script of most letters, by the names of the characters."""
    names = (unicodedata.name(letter, "").split()[:1] for letter in text if letter.isalpha() or letter == "\u0e31")
    counts = Counter(SCRIPTS[name[0]] for name in names if name and name[0] in SCRIPTS)
    return counts.most_common(1)[0][0] if counts else "common"


# -- scripts


def test_scripts_agree_with_the_names_of_the_letters() -> None:
    first_words = {
        "LATIN": "Latin",
        "GREEK": "Greek",
        "CYRILLIC": "Cyrillic",
        "ARMENIAN": "Armenian",
        "HEBREW": "Hebrew",
        "ARABIC": "Arabic",
        "DEVANAGARI": "Devanagari",
        "BENGALI": "Bengali",
        "TAMIL": "Tamil",
        "TELUGU": "Telugu",
        "THAI": "Thai",
        "TIBETAN": "Tibetan",
        "GEORGIAN": "Georgian",
        "ETHIOPIC": "Ethiopic",
        "KHMER": "Khmer",
        "HANGUL": "Hangul",
        "HIRAGANA": "Kana",
        "KATAKANA": "Kana",
        "CJK": "Han",
    }
    letters, agree = Counter[str](), Counter[str]()
    for point in (*range(0xD800), *range(0xE000, 0x10000)):
        name = unicodedata.name(chr(point), "").partition(" ")[0]
        if name in first_words and unicodedata.category(chr(point))[0] == "L":
            letters[name] += 1
            agree[name] += find_main_script(chr(point)) == first_words[name]
    assert len(letters) == len(first_words)
    assert {name: count for name, count in letters.items() if agree[name] < 0.9 * count} == {}
    assert sum(agree.values()) > 0.997 * sum(letters.values())
    assert find_main_script("12 % -- \U0001f600") == find_main_script("") == COMMON
    assert find_main_script("\u1820 12") == OTHER, "Mongolian has no entry"


# -- numbers


@pytest.mark.slow
def test_totals_sources_and_lengths_are_those_of_the_corpus(corpus: Corpus) -> None:
    result = report(corpus.output, "--seq-length", SEQ_LENGTH)
    documents = [corpus.encode(text) for text in corpus.all_texts]
    lengths = sorted(map(len, documents))
    assert (result["kind"], result["stage"], result["state"]) == ("dataset", "preprocess", "complete")
    assert result["totals"]["documents"] == len(documents)
    assert result["totals"]["tokens"] == sum(lengths)
    assert result["totals"]["empty_documents"] == 1
    sources = {source["name"]: (source["documents"], source["tokens"]) for source in result["sources"]["listed"]}
    assert sources == {
        name: (len(texts), sum(len(corpus.encode(text)) for text in texts)) for name, texts in corpus.texts.items()
    }
    assert sum(source["share"] for source in result["sources"]["listed"]) == pytest.approx(1)
    directories = {source["name"]: source["documents"] for source in result["sources"]["directories"]}
    assert directories == {".": len(documents) - 47, "web": 47}

    summary = result["lengths"]
    assert (summary["shortest"], summary["longest"]) == (lengths[0], lengths[-1])
    assert summary["mean"] == pytest.approx(sum(lengths) / len(lengths))
    for entry in summary["percentiles"]:
        reached = next(
            length for rank, length in enumerate(lengths, 1) if rank >= entry["percent"] / 100 * len(lengths)
        )
        assert entry["tokens"] == reached, entry
    longer = [length for length in lengths if length > SEQ_LENGTH]
    assert summary["longer_documents"] == len(longer) > 0
    assert summary["longer_tokens"] == sum(longer)
    assert summary["tokens_beyond"] == sum(longer) - len(longer) * SEQ_LENGTH
    for entry in summary["histogram"]:
        inside = [length for length in lengths if entry["first"] <= length <= entry["last"]]
        assert (entry["documents"], entry["tokens"]) == (len(inside), sum(inside))
    assert sum(entry["documents"] for entry in summary["histogram"]) == len(lengths)


@pytest.mark.slow
def test_ids_and_duplicates_are_those_of_the_corpus(corpus: Corpus) -> None:
    result = report(corpus.output)
    documents = [tuple(corpus.encode(text)) for text in corpus.all_texts]
    counts = Counter(id for document in documents for id in document)
    usage = result["usage"]
    assert usage["sample"]["seed"] is None
    assert {entry["id"]: entry["count"] for entry in usage["frequent"]} == {
        entry["id"]: counts[entry["id"]] for entry in usage["frequent"]
    }
    assert [entry["count"] for entry in usage["frequent"]] == sorted(counts.values(), reverse=True)[:50]
    unused = set(range(usage["vocabulary"])) - set(counts)
    assert (usage["used"], usage["never_used"]) == (len(counts), len(unused))
    listed = {id for entry in usage["never_used_ranges"] for id in range(entry["first"], entry["last"] + 1)}
    assert listed <= unused and (len(usage["never_used_ranges"]) == 100 or listed == unused)

    copies = Counter(documents)
    duplicates = result["duplicates"]
    assert duplicates["distinct"] == len(copies)
    assert duplicates["duplicates"] == len(documents) - len(copies) > 0
    assert duplicates["duplicate_tokens"] == sum((count - 1) * len(ids) for ids, count in copies.items())
    largest = sorted((count for count in copies.values() if count > 1), reverse=True)[:20]
    assert [group["copies"] for group in duplicates["groups"]] == largest
    group = duplicates["groups"][0]
    shown = run_in_process("inspect", corpus.output, "--document", group["document"], "--json").result
    assert copies[tuple(shown["tokens"])] == group["copies"] and len(shown["tokens"]) == group["tokens"]


@pytest.mark.slow
def test_scripts_are_those_of_the_corpus(corpus: Corpus) -> None:
    expected: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for text in corpus.all_texts:
        entry = expected[find_script(text)]
        ids = corpus.tokenizer.encode(text, add_special_tokens=False).ids
        for place, number in enumerate((1, len(text), len(text.encode()), len(ids))):
            entry[place] += number
    scripts = report(corpus.output)["scripts"]
    assert scripts["sample"]["documents"] == len(corpus.all_texts) and scripts["cut"] == 0
    assert {
        entry["script"]: [entry["documents"], entry["characters"], entry["bytes"], entry["tokens"]]
        for entry in scripts["scripts"]
    } == dict(expected)


@pytest.mark.slow
def test_two_tokenizers(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "no-merges")
    path = tmp_path / "no-merges/tokenizer.json"
    description = json.loads(path.read_text())
    description["model"]["merges"] = []
    path.write_text(json.dumps(description))
    ended = tokenmill("report", corpus.output, "--tokenizer-compare", tmp_path / "no-merges", "--json")
    assert ended.code == 0, ended.err
    compared = ended.result["compared"]
    other = Tokenizer.from_file(str(path))
    for entry in compared["scripts"]:
        texts = [text for text in corpus.all_texts if find_script(text) == entry["script"]]
        counts = [
            sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
            for tokenizer in (corpus.tokenizer, other)
        ]
        assert [entry["first_tokens"], entry["second_tokens"]] == counts
    assert compared["second"] == {
        "reference": "no-merges",
        "vocab_size": other.get_vocab_size(),
        "eod_token": None,
        "eod_id": None,
    }
    refused = tokenmill("report", corpus.output, "--tokenizer-compare", tmp_path / "absent")
    assert refused.code == 2 and "no tokenizer directory" in refused.err


@pytest.mark.slow
def test_rejected_records_stages_and_lineage(corpus: Corpus) -> None:
    result = report(corpus.output)
    assert {entry["reason"]: entry["records"] for entry in result["rejected"]} == {
        "'...' is a number, not text": 2,
        "there is no key '...' (the keys are '...')": 1,
        "invalid JSON at column N (Unterminated string starting at); each line must contain one record": 1,
    }
    accepted = len(corpus.all_texts)
    extract, preprocess = result["stages"]
    assert (extract["stage"], extract["records"], extract["written"]) == ("extract", accepted + 4, accepted + 4)
    assert (preprocess["records"], preprocess["written"], preprocess["rejected"]) == (accepted + 4, accepted, 4)
    assert preprocess["tokens"] == result["totals"]["tokens"]
    size = sum(path.stat().st_size for path in corpus.output.rglob("*.*") if ".tokenmill" not in path.parts)
    tokenizer = sum(path.stat().st_size for path in (corpus.output / "tokenizer").iterdir())
    assert preprocess["output_bytes"] == size - tokenizer == result["totals"]["bytes"]
    receipts = [
        json.loads(path.read_text()) for path in (corpus.output / ".tokenmill/preprocess/receipts").glob("*.json")
    ]
    assert preprocess["units"] == preprocess["units_done"] == len(receipts)
    assert preprocess["machines"] == 1
    assert 0 < preprocess["busy_seconds"] <= preprocess["elapsed_seconds"] <= 60
    assert preprocess["tokens_per_second"] == pytest.approx(preprocess["tokens"] / preprocess["busy_seconds"])
    manifest = json.loads((corpus.output.parent / ".tokenmill/extract/manifest.json").read_text())
    assert [step["stage"] for step in result["lineage"]] == ["preprocess", "extract", "source"]
    assert result["lineage"][1]["content"] == manifest["hash"]


@pytest.mark.slow
def test_a_sample_is_named(corpus: Corpus) -> None:
    total = report(corpus.output)["totals"]["tokens"]
    first, again = (report(corpus.output, "--sample-tokens", total // 3) for _ in range(2))
    assert first["usage"] == again["usage"], "the seed is fixed"
    sample = first["usage"]["sample"]
    assert sample["seed"] == 1234
    assert 0 < sample["documents"] < sample["of_documents"] == len(corpus.all_texts)
    assert 0.1 * total < sample["tokens"] < 0.6 * total and sample["of_tokens"] == total
    assert sum(entry["count"] for entry in first["usage"]["frequent"]) <= sample["tokens"]
    assert first["lengths"] == report(corpus.output)["lengths"], "lengths are exact"
    text = run_in_process("report", corpus.output, "--sample-tokens", total // 3).out
    named = f"a sample of {sample['documents']} of {sample['of_documents']} documents (seed 1234)"
    assert text.count(named) == 2 and "never used in the sample" in " ".join(text.split())
    assert report(corpus.output, "--sample-tokens", 1, "--all")["usage"] == report(corpus.output)["usage"]


# -- the opening and the sections


def make_run(**changes: Any) -> RunReport:
    """Return a report about a run that completed, with changed fields."""
    fields: dict[str, Any] = {
        "path": "run",
        "verdict": "completed at iteration 40",
        "axis": None,
        "summary": None,
        "plots": None,
        "stalled": [],
        "attempts": [RunAttempt("2026-11-25", 0, 40, iterated=True, end="")],
        "checkpoints": [SavedCheckpoint("iter_0000040", 40, 12_000_000, None, "complete", is_tracked=True)],
        "notes": [],
    }
    return RunReport(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "state", "status"),
    [
        ({}, "good", "Complete: completed at iteration 40."),
        ({"verdict": "no attempt is recorded", "attempts": []}, "unsure", "Unknown: no attempt is recorded."),
        ({"verdict": "it runs, or it was killed"}, "unsure", "Incomplete: it runs, or it was killed."),
        ({"verdict": "ended with exit code 1"}, "bad", "Incomplete: ended with exit code 1."),
        (
            {"checkpoints": [SavedCheckpoint("x", 1, 1, None, "a file is missing", is_tracked=False)]},
            "unsure",
            "Complete, with problems: 1 checkpoint is not complete: completed at iteration 40.",
        ),
    ],
)
def test_the_status_of_a_run(changes: dict[str, Any], state: str, status: str) -> None:
    opening = make_opening(make_run(**changes))
    assert (opening.state, opening.status) == (state, status)


def test_a_run_without_metrics_has_the_figures_that_are_known() -> None:
    figures = [f"{figure.value} {figure.label}" for figure in make_opening(make_run()).figures]
    assert figures == ["40 iterations (last checkpoint)", "1 checkpoint", "1 attempt", "12.00 MB of checkpoints"]


@pytest.mark.slow
def test_the_text_opens_with_the_status_and_four_figures(corpus: Corpus, tmp_path: Path) -> None:
    totals = report(corpus.output)["totals"]
    lengths = sorted(len(corpus.encode(text)) for text in corpus.all_texts)
    text = run_in_process("report", corpus.output).out
    name, status, figures, *rest = text.splitlines()
    assert (name, status) == (f"dataset {corpus.output}", "Complete, with problems: 4 records were rejected.")
    assert figures == (
        f"{len(corpus.all_texts)} documents, {totals['tokens']:,} tokens, {format_bytes(totals['bytes'])} on disk, "
        f"{lengths[(len(lengths) - 1) // 2]} tokens in the median document"
    )
    titles = [line for line in rest if line.split(":")[0].isupper()]
    assert titles[0] == "SIZE: How large is it?" and titles[-1] == "LINEAGE: Where does the data come from?"
    assert all(re.fullmatch(r"[A-Z ]+: [A-Z].*\?", title) for title in titles)
    ids = text.partition("IDS:")[2].partition("DUPLICATES:")[0]
    assert len(re.findall(r"^ +[\d,]+ +\"", ids, re.MULTILINE)) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("datasets", "documents"), [({"a": "a.jsonl"}, 30), ({"a": "a.jsonl", "b": "b.jsonl"}, 50)], ids=["one", "blend"]
)
def test_masks_lengths_and_packing_of_sft(datasets: dict[str, str], documents: int, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tok")
    for name, rows in (("a", 30), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(conversations(ord(name), rows)))
    blend = {"datasets": [{"name": name, "path": path} for name, path in datasets.items()]}
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    options = ["--tokenizer", tmp_path / "tok", "--chat-template", "chatml", "--pack-size", 1024, "--processes", 1]
    done = tokenmill("sft", tmp_path / "blend.json", tmp_path / "out", *options)
    assert done.code == 0, done.err
    result = report(tmp_path / "out")
    totals, pack = result["totals"], result["pack"]
    assert totals["documents"] == documents and (pack["pack_size"], pack["format"]) == (1024, "parquet")
    assert [step["stage"] for step in result["lineage"]] == ["pack", *["chat", "source"] * len(datasets)]
    assert [stage["stage"] for stage in result["stages"]] == [*["chat"] * len(datasets), "pack"]
    text = " ".join(run_in_process("report", tmp_path / "out").out.split())
    share = totals["trained_tokens"] / totals["tokens"]
    assert f"{share:.2%} of the tokens trained SIZE: " in text
    assert "MASKS: Which tokens are trained? The loss counts only loss tokens." in text
    assert f" trained {totals['trained_tokens']:,} {share:.2%} not trained " in text
    assert "LENGTHS: How long are the sequences? " in text
    assert f"packed rows {pack['rows']}, of at most 1,024 tokens, as parquet sequences {pack['sequences']} " in text
    assert f" filled {pack['fill']:.2%} " in text and 0.5 < pack["fill"] <= 1


@pytest.mark.slow
def test_a_source_directory_appears_by_its_path(corpus: Corpus, tmp_path: Path) -> None:
    """An output has the path of a source with a scheme; of a directory it has only the name."""
    shutil.copytree(corpus.output.parents[1] / "corpus" / "web", tmp_path / "raw")
    options = ["--tokenizer", TOKENIZER]
    for source, output, place in (
        (tmp_path / "raw", tmp_path / "named", "raw"),
        (f"file://{tmp_path}/raw", tmp_path / "streamed", str(tmp_path / "raw")),
    ):
        assert run_in_process("preprocess", source, output, *options).code == 0
        result = report(output)
        assert (result["source"], result["lineage"][-1]["place"]) == (place, place)
        shown = run_in_process("inspect", output).out + run_in_process("inspect", output, "--document", 0).out
        assert f"source: {place}\n" in shown and f"\nin {place}\n" in shown
        assert "file:" not in shown + run_in_process("report", output).out


# -- content


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.mark.slow
def test_no_content_of_the_data_without_examples(corpus: Corpus, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    outputs = [
        tokenmill("report", corpus.output).out,
        tokenmill("report", corpus.output, "--json").out,
        tokenmill("report", corpus.output, "--html", page).out + page.read_text(),
    ]
    for output in outputs:
        assert SECRET not in output and "onerror" not in output
        assert SECRET[3:20] not in output
    policy = next(values["content"] for tag, values in Elements(page.read_text()).elements if "http-equiv" in values)
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-") and "script-src" not in str(policy)


@pytest.mark.slow
def test_examples_are_escaped(corpus: Corpus, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run_in_process("report", corpus.output, "--examples", 1, "--html", page).code == 0
    text = page.read_text()
    assert SECRET in text and "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text
    elements = Elements(text).elements
    assert not [tag for tag, _ in elements if tag in ("img", "script")]
    attributes = [(name, value) for _, values in elements for name, value in values.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name == "style"]
    assert {str(value)[:1] for name, value in attributes if name in ("src", "href", "action")} == {"#", "d"}
    result = report(corpus.output, "--examples", 2)
    kinds = Counter(example["kind"] for example in result["examples"])
    assert kinds == {"rejected": 4, "repeated": 2, "longest": 2}
    longest = next(example for example in result["examples"] if example["kind"] == "longest")
    assert longest["text"].startswith(HOSTILE) and len(longest["text"]) == 203


@pytest.mark.slow
def test_credentials_are_redacted(tmp_path: Path) -> None:
    """The credential is a part of the path, of the source and of a file, and `tokenmill` knows it as HF_TOKEN."""
    root = tmp_path / SECRET
    root.mkdir()
    (root / f"{SECRET}.jsonl").write_text('{"text": "hello"}\n{"text": 5}\n')
    command = ["--tokenizer", TOKENIZER, "--on-bad-record", "quarantine", "--max-bad-records", 5]
    done = tokenmill("preprocess", root, root / "out", *command)
    assert done.code == 0, done.err
    page = tmp_path / "report.html"
    options = ["--examples", "1", "--html", page]
    written = tokenmill("report", root / "out", *options, "--json", HF_TOKEN=SECRET)
    assert written.code == 0, written.err
    shown = tokenmill("report", root / "out", HF_TOKEN=SECRET)
    assert "REDACTED" in page.read_text().upper()
    assert SECRET not in page.read_text() + written.out + shown.out


# -- other outputs


@pytest.mark.slow
def test_a_dataset_without_its_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.output, tmp_path / "out")
    for path in (tmp_path / "out/.tokenmill/preprocess/encoders").glob("*/backend.json"):
        path.unlink()
    result = report(tmp_path / "out")
    assert result["scripts"] is None and result["totals"]["documents"] == len(corpus.all_texts)
    assert {entry["piece"] for entry in result["usage"]["frequent"]} == {None}
    (note,) = result["notes"]
    assert "backend.json is missing; run the same tokenmill preprocess again" in note
    assert [step["stage"] for step in result["lineage"]] == ["preprocess", "extract", "source"]
    assert result["lineage"][1]["place"] == "its state files are not near this output"
    refused = run_in_process("report", tmp_path / "out", "--tokenizer-compare", TOKENIZER)
    assert refused.code == 2 and "run the same tokenmill preprocess again" in refused.err


@pytest.mark.slow
def test_an_unfinished_output(corpus: Corpus, tmp_path: Path) -> None:
    command = ["preprocess", corpus.output.parent, tmp_path / "out", "--tokenizer", TOKENIZER]
    quarantine = ["--on-bad-record", "quarantine", "--max-bad-records", 9]
    started = tokenmill(*command, *quarantine, "--workers", 2, "--worker-index", 0)
    assert started.code == 0, started.err
    result = report(tmp_path / "out")
    status = run_in_process("status", tmp_path / "out", "--json").result
    assert result["state"] == status["state"] == "stopped"
    assert result["totals"] is None and result["usage"] is None
    assert (result["stages"][-1]["units_done"], result["stages"][-1]["units"]) == (
        status["units_done"],
        status["units"],
    )
    assert result["notes"][0].startswith("NOT FINISHED: ") and "tokenmill status" in result["notes"][0]
    text = run_in_process("report", tmp_path / "out").out
    assert "\nIncomplete: the state of preprocess is stopped.\n" in text and "NOT FINISHED" in text


@pytest.mark.slow
def test_a_failure_that_quotes_a_record(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text('{"text": "hello"}\n' * 3 + json.dumps({SECRET: 1}) + "\n")
    failed = tokenmill("preprocess", tmp_path / "corpus", tmp_path / "out", "--tokenizer", TOKENIZER)
    assert failed.code == 2 and SECRET in failed.err, "the failure quotes the keys of the record"
    for options in ([], ["--json"]):
        ended = tokenmill("report", tmp_path / "out", *options)
        assert ended.code == 0, ended.err
        assert (
            "NOT FINISHED: 0 of 1 units of preprocess are finished (state: failed)" in ended.out
            and SECRET not in ended.out
        )


@pytest.mark.slow
def test_outputs_of_text_of_chat_and_of_pack(corpus: Corpus, tmp_path: Path) -> None:
    result = report(corpus.output.parent, "--examples", 1)
    assert result["stage"] == "preprocess", "a directory of a dataset has the pairs below it"
    shutil.copytree(corpus.output.parent, tmp_path / "text", ignore=lambda *_: ["preprocessed"])
    result = report(tmp_path / "text")
    assert (result["stage"], result["totals"], result["stages"][0]["written"]) == (
        "extract",
        None,
        len(corpus.all_texts) + 4,
    )
    refused = run_in_process("report", tmp_path / "text", "--tokenizer-compare", TOKENIZER)
    assert refused.code == 2 and "specify an output of preprocess" in refused.err

    make_tokenizer(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
    (tmp_path / "rows.jsonl").write_bytes(lines([{"messages": talk}] * 3 + [{"messages": []}]))
    run = StageRun(Reporter(), processes=1)
    chat, pack = tmp_path / "chat", tmp_path / "chat" / "packed"
    options = {"tokenizer": str(tmp_path / "tokenizer"), "chat_template": "nano3", "on_bad_record": "quarantine"}
    stages.chat(tmp_path / "rows.jsonl", chat, run, **options)
    stages.pack(chat, pack, run, pack_size=64)
    result = report(chat)
    assert (result["totals"]["documents"], result["duplicates"]["duplicates"]) == (3, 2)
    assert 0 < result["totals"]["trained_tokens"] < result["totals"]["tokens"]
    assert [(entry["stage"], entry["records"]) for entry in result["rejected"]] == [("chat", 1)]
    packed = report(pack)
    assert result["pack"] == packed["pack"], "the pack is below the output of chat"
    assert packed["pack"]["sequences"] == 3 and packed["pack"]["tokens"] == result["totals"]["tokens"]
    assert packed["pack"]["fill"] == pytest.approx(packed["pack"]["tokens"] / packed["pack"]["rows"] / 64)
    assert [step["stage"] for step in packed["lineage"]] == ["pack", "chat", "source"]


@pytest.mark.slow
def test_pairs_without_documents(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    (tmp_path / "corpus/b.jsonl").write_text('{"text": "hello"}\n')
    run = StageRun(Reporter(), processes=1)
    stages.preprocess(tmp_path / "corpus", tmp_path / "out", run, tokenizer=str(TOKENIZER))
    result = report(tmp_path / "out")
    assert result["totals"]["empty_documents"] == 2
    assert "2 documents without tokens are in pairs that were not written" in result["notes"]
    assert run_in_process("report", tmp_path / "out", "--html", tmp_path / "empty.html").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "problem"), [(-16, "document indices decrease at"), (34, "sequence 0 has the length")]
)
def test_an_index_that_is_damaged(corpus: Corpus, tmp_path: Path, offset: int, problem: str) -> None:
    """The index has its size; an entry of its document indices, and the first length, are wrong."""
    output = shutil.copytree(corpus.output, tmp_path / "out")
    index = min(output.glob("*.idx"))
    data = bytearray(index.read_bytes())
    data[offset + 3 + len(data) * (offset < 0)] = 0x80
    index.write_bytes(data)
    ended = run_in_process("report", output)
    assert ended.code == 2, ended.err
    assert f"{index}: " in ended.err and problem in ended.err and "--verify-hashes" in ended.err


@pytest.mark.slow
def test_directories_without_an_output(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "run tokenmill preprocess first, or specify an output directory"),
        (tmp_path / "absent", "it does not exist; check the path"),
    ):
        ended = run_in_process("report", path)
        assert ended.code == 2 and message in ended.err
    assert run_in_process("report", tmp_path, "--metrics", tmp_path).code == 2


@pytest.mark.slow
def test_a_run_whose_metrics_are_elsewhere(tmp_path: Path) -> None:
    """The record of the run's data counts, also if the log is in another directory."""
    run, log = tmp_path / "run", tmp_path / "slurm" / "job.out"
    (run / ".tokenmill" / "train").mkdir(parents=True)
    write_record(run, run_files.identity(kind="synthetic"), run_files.GLOBAL_BATCH)
    log.parent.mkdir()
    lines = [run_files.megatron_line(step, clock=step, loss=0.4 / step) for step in range(10, 400, 10)]
    log.write_text("\n".join(lines))
    summary = report(run, "--metrics", log)["summary"]
    assert (summary["sequence_length"], summary["synthetic"]) == (run_files.SEQ_LENGTH, True)
    assert summary["tokens"] == 390 * run_files.GLOBAL_BATCH * run_files.SEQ_LENGTH and summary["fingerprint"]
    assert "SYNTHETIC" in run_in_process("report", run, "--metrics", log).out

    write_record(log.parent, run_files.identity(seed=7), run_files.GLOBAL_BATCH)
    ended = run_in_process("report", run, "--metrics", log)
    assert ended.code == 2 and "the records of several runs" in ended.err


@pytest.mark.slow
def test_only_reports_are_replaced(corpus: Corpus, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for _ in range(2):
        assert run_in_process("report", corpus.output, "--html", page).code == 0
    page.write_text("my own page")
    ended = run_in_process("report", corpus.output, "--html", page)
    assert ended.code == 2 and "is not a report of tokenmill report; remove it" in ended.err
    assert page.read_text() == "my own page"


@pytest.mark.slow
def test_a_target_that_cannot_be_a_report_is_refused_first(corpus: Corpus, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.html")
    for target in (tmp_path / "pipe.html", Path("/proc/report.html")):
        ended = run_in_process("report", corpus.output, "--html", target)
        assert ended.code == 2 and "choose another FILE" in ended.err, ended


# -- in a browser


@pytest.mark.slow
def test_page_in_a_browser(browser: Page, corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert run_in_process("report", corpus.output, "--examples", 2, "--html", path).code == 0
    browser.resize(1200, 900)
    browser.open(path.as_uri())
    light = browser.measure_legibility()
    browser.resize(1200, 900, dark=True)
    dark = browser.measure_legibility()
    assert light["background"] != dark["background"]
    for measured in (light, dark):
        assert measured["lowest"][0] >= 4.5, measured
        assert measured["smallest"] >= 11
    for width in (375, 1200):
        browser.resize(width, 800)
        browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
        tables = browser.evaluate(
            "[...document.querySelectorAll('.scroll')].map((table) => [table.getAttribute('aria-label'),"
            " table.scrollWidth - table.clientWidth, table.querySelector('.hint').offsetWidth > 0])"
        )
        scrolls = [(label, hidden > 0) for label, hidden, _ in tables if hidden != 1]  # one pixel may be rounded
        assert scrolls == [(label, told) for label, hidden, told in tables if hidden != 1]
        assert width > 375 or sum(hidden > 1 for _, hidden, _ in tables) >= 4
    figures = browser.evaluate("[...document.querySelectorAll('.figures dd')].map((number) => number.innerText)")
    assert len(figures) == 4 and figures[0] == str(len(corpus.all_texts))
    assert browser.evaluate("parseFloat(getComputedStyle(document.querySelector('.figures dd')).fontSize)") >= 24
    assert browser.evaluate("document.querySelector('.status').innerText").startswith("Complete, with problems: 4 ")
    headings = browser.evaluate(
        "[...document.querySelectorAll('h2')].map((title) => [title.innerText, title.nextSibling.innerText])"
    )
    assert headings[0] == ["Size", "How large is it?"]
    assert all(len(title.split()) <= 2 and question.endswith("?") for title, question in headings)
    frequent = "document.querySelector('[aria-label=\"the 10 most frequent ids\"] tbody').rows.length"
    assert browser.evaluate(frequent) == 10
    bars = browser.evaluate("document.querySelectorAll('td.bar svg').length")
    rows = browser.evaluate("document.querySelectorAll('tbody td.bar').length")
    assert bars == rows > len(corpus.texts)
    assert browser.list_requests() == [path.as_uri()]
    assert browser.list_complaints() == []


@pytest.mark.slow
def test_plots_of_a_run_in_a_browser(browser: Page, tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "run.html"
    (run / ".tokenmill" / "train").mkdir(parents=True)
    losses = {step: 11.3 if step == 1500 else 2 / step for step in range(1, 2000)}
    (run / "metrics.csv").write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in losses.items()))
    assert run_in_process("report", run, "--html", path).code == 0
    for width in (1200, 375):
        browser.resize(width, 900)
        browser.open(path.as_uri())
        assert browser.evaluate("document.querySelectorAll('section svg[data-kind=loss] path').length") == 2
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
        ticks = "[...document.querySelectorAll('svg[data-kind=loss] text[text-anchor=end]')]"
        labels = browser.evaluate(f"{ticks}.map((label) => label.textContent)")
        assert labels == [str(value) for value in range(0, 13, 2)], "round ticks, with the spike, not below 0"
        measured = browser.measure_legibility()
        assert measured["lowest"][0] >= 4.5 and measured["smallest"] >= 11, measured
    browser.hover("svg[data-kind=loss]", 0.5)
    assert re.search(r"run\s+\d\.\d{4}", browser.evaluate("document.querySelector('.tip').innerText"))
    assert browser.list_complaints() == []
