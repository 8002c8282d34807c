"""The command line as Kubernetes and scripts use it: help, exit codes, machine-readable output, start-up."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from support.commandline import CommandResult, data_of, run_many, tokenmill
from support.corpus import TOKENIZER
from tokenmill import __version__, errors
from tokenmill.cli import commands as registered
from tokenmill.engine import options
from tokenmill.sources import options as corpus_options
from tokenmill.stages.chat import options as chat_options
from tokenmill.stages.pack import options as packing_options
from tokenmill.stages.transform import options as transform_options
from tokenmill.tokenize import options as tokens_options

COMMANDS = (
    "sample",
    "run",
    "download",
    "extract",
    "concatenate",
    "transform",
    "preprocess",
    "adopt",
    "join",
    "forget",
    "verify",
    "sft",
    "chat",
    "pack",
    "blend",
    "check-data",
    "fit",
    "train",
    "checkpoint",
    "status",
    "inspect",
    "report",
    "compare",
    "help",
)
SUBCOMMANDS = ("train diagnose",)
HEAVY = {
    "datasets",
    "fastokens",
    "obstore",
    "gigatoken",
    "httpx",
    "huggingface_hub",
    "numpy",
    "orjson",
    "pyarrow",
    "requests",
    "rich",
    "tokenizers",
    "torch",
    "transformers",
    "zstandard",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{number}.jsonl").write_text(json.dumps({"text": f"document {number}"}) + "\n")
    return tmp_path / "corpus"


# -- start-up and help


def test_every_command_has_help_without_heavy_imports() -> None:
    ended, modules = run_many([["--help"], *([*name.split(), "--help"] for name in (*COMMANDS, *SUBCOMMANDS))])
    assert registered.COMMANDS == COMMANDS, "add the new command here as well"
    assert [result.code for result in ended] == [0] * len(ended)
    assert all(name in ended[0].out for name in COMMANDS)
    for name, result in zip((*COMMANDS, *SUBCOMMANDS), ended[1:], strict=True):
        assert result.out.startswith(f"Usage: tokenmill {name} ") and "\x1b" not in result.out
    assert HEAVY & modules == set()


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import tokenmill; print(*(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tokenmill"]


@pytest.mark.slow
def test_a_worker_loads_no_transformers(tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "large")
    description = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"unused{number}": len(vocabulary) + number for number in range(65_500)}
    (tmp_path / "large/tokenizer.json").write_text(json.dumps(description))
    command = ["preprocess", str(corpus), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "large")]
    assert tokenmill(*command, "--workers", "2", "--worker-index", "0").code == 0
    (ended,), modules = run_many([[*command, "--workers", "2", "--worker-index", "1"]])
    assert (ended.code, {"torch", "transformers"} & modules) == (0, set())
    assert tokenmill("verify", tmp_path / "out").code == 0
    assert "ids as int32" in tokenmill("inspect", tmp_path / "out").out
    assert tokenmill("inspect", tmp_path / "out", "--document", "3").out.endswith("\ndocument 3\n")


def test_the_console_script_and_the_module_are_the_same_program() -> None:
    script = Path(sys.executable).with_name("tokenmill")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == tokenmill("--version", real_backoff=True).out == f"tokenmill {__version__}\n"


# -- exit codes


def test_exit_codes_of_the_errors_are_the_contract_with_kubernetes() -> None:
    assert {
        kind.__name__: kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TokenmillError)
    } == {
        "TokenmillError": 1,
        "RequestError": 2,
        "MachineError": 2,
        "InputError": 2,
        "TemplateLimit": 2,
        "TransientError": 1,
        "Superseded": 1,
        "Stopped": 143,
        "StoppedEarly": 1,
    }


FAILING = """
import builtins
from tokenmill import errors
from tokenmill.engine import status

def fail(path, *_):
    raise (getattr(errors, path.name, None) or getattr(builtins, path.name))("what, where, what to do")

status.list_statuses = fail
"""


def test_an_error_becomes_a_message_and_a_bug_keeps_its_traceback() -> None:
    kinds = ["RequestError", "InputError", "TransientError", "Superseded", "Stopped", "ValueError"]
    plain, _ = run_many([["status", kind] for kind in kinds], FAILING)
    for_machines, _ = run_many([["status", kind, "--json"] for kind in kinds[:-1]], FAILING)
    assert [ended.code for ended in plain] == [2, 2, 1, 1, 143, 1]
    assert [ended.out for ended in plain] == [""] * len(kinds)
    assert [ended.err for ended in plain[:-1]] == ["error: what, where, what to do\n"] * (len(kinds) - 1)
    assert "Traceback" in plain[-1].err and "ValueError: what" in plain[-1].err
    for ended, same in zip(plain, for_machines, strict=False):
        event = {"event": "error", "message": "what, where, what to do", "exit_code": ended.code}
        assert (same.code, json.loads(same.err)) == (ended.code, event)


USAGE = [
    [],
    ["nonsense"],
    ["--nonsense"],
    ["download"],
    ["download", "only-a-source"],
    ["download", "source", "out", "--layout", "heap"],
    ["download", "source", "out", "--sample", "0"],
    ["download", "source", "out", "--connections", "many"],
    ["preprocess", "input"],
    ["preprocess", "input", "--tokenizer", "t", "--encoder", "abacus"],
    ["preprocess", "input", "--tokenizer", "t", "--on-bad-record", "shrug"],
    ["extract", "input", "--workers", "0"],
    ["extract", "input", "--worker-index", "-1"],
    ["extract", "input", "--worker-index", "2", "--workers", "2"],
    ["concatenate", "input", "--target-files", "0"],
    ["concatenate", "input", "--target-files", "1e3"],
    ["status"],
    ["inspect", "x", "--file", "y"],
]


def test_wrong_usage_is_exit_2_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, ended in zip(USAGE, run_many(USAGE)[0], strict=True):
        assert ended.code == 2, arguments
        assert "Usage: tokenmill" in ended.err + ended.out and "Traceback" not in ended.err
        # The message names the option, or the missing argument.
        assert arguments == [] or any(word in ended.err for word in (*arguments[-2:], arguments[-4:][0], "Missing"))
    assert list(tmp_path.iterdir()) == []


EMPTY = [
    ["run", "", "out", "--tokenizer", "t"],
    ["download", "source", ""],
    ["extract", ""],
    ["extract", "corpus", ""],
    ["preprocess", "", "--tokenizer", "t"],
    ["preprocess", "corpus", "out", "--tokenizer", "t", "--scratch", ""],
    ["adopt", "corpus/0", "", "--tokenizer", "t"],
    ["blend", "out.txt", "corpus", ""],
    ["fit", "--custom="],
    ["verify", ""],
    ["checkpoint", "list", ""],
    ["train", ""],
    ["train", "diagnose", ""],
]


def test_an_empty_path_is_not_the_current_directory(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable must not make a command read or write the current directory."""
    monkeypatch.chdir(corpus.parent)
    before = sorted(corpus.parent.rglob("*"))
    for arguments, ended in zip(EMPTY, run_many(EMPTY)[0], strict=True):
        assert ended.code == 2, (arguments, ended)
        assert "it is empty; check that the shell variable in the command is set" in ended.err, (arguments, ended)
    assert sorted(corpus.parent.rglob("*")) == before


REFUSED = {
    ("extract", "nowhere"): "nowhere does not exist; specify a directory of your own files, the output directory of an "
    "earlier stage, or a file",
    ("preprocess", "corpus", "--tokenizer", "t", "--revision", "main", "--sample", "2"): "Invalid value for "
    "--revision, --sample: it needs a source such as hf://datasets/ORG/NAME, but corpus is a path",
    ("extract", "corpus", "--prefer", "zst"): "'zst' is not one of compressed, plain",
    ("extract", "corpus", "corpus/0.jsonl/out"): "cannot open corpus/0.jsonl/out: Not a directory; choose another path",
    ("concatenate", "corpus", "out", "--target-files", "9"): "choose 4 or fewer",
    ("status", "corpus"): "no stage of tokenmill was started",
    ("verify", "corpus"): "corpus",
    ("inspect", "corpus"): "corpus",
    ("train", "diagnose", "corpus"): "corpus has neither stacks nor flight-recorder dumps that can be read",
    ("train", "diagnose", "nowhere"): "nowhere is not a directory",
    ("download", "ftp://x/y", "out"): "is not a supported source",
}


def test_impossible_request_is_exit_2_with_a_reason(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    for (arguments, message), ended in zip(
        REFUSED.items(), run_many([list(command) for command in REFUSED])[0], strict=True
    ):
        assert ended.code == 2, (arguments, ended)
        assert message in ended.err and "Traceback" not in ended.err, (arguments, ended)
        assert ended.out == ""


@pytest.mark.slow
def test_error_of_several_processes_is_the_last_line(corpus: Path, tmp_path: Path) -> None:
    """multiprocessing, which checks for leaked semaphores, prints nothing after the error."""
    (corpus / "0.jsonl").write_text("[\n")
    ended = tokenmill("extract", corpus, tmp_path / "out", "--processes", 2)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith(
        "error: 0.jsonl: the content is one JSON array, not one record per line"
    )


# -- output for machines


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_with_json_every_line_is_json_and_results_are_on_standard_output(corpus: Path) -> None:
    output = str(corpus.parent / "out")
    join = ["concatenate", str(corpus), output, "--json", "--target-files"]
    commands = [[*join, "2"], ["status", output, "--json"], ["verify", output, "--json"], [*join, "3"]]
    (joined, status, verified, refused), _ = run_many(commands)
    assert joined.code == 0, joined.err
    [result] = lines(joined.out)
    assert result["event"] == "result" and result["complete"] and result["stage"] == "concatenate"
    assert (result["units"], result["units_done"], result["units_done_now"]) == (2, 2, 2)
    assert result["bytes"] == sum(map(len, data_of(Path(output)).values())) and result["counts"]["out"] == 4
    assert {line["event"] for line in lines(joined.err)} == {"message", "at_work"}

    [state] = lines(status.out)
    assert (state["stage"], state["state"], state["units_done"]) == ("concatenate", "complete", 2)
    [checked] = lines(verified.out)
    assert checked["event"] == "verify" and checked["problems"] == []
    assert refused.code == 2 and refused.out == ""
    assert lines(refused.err)[-1]["exit_code"] == 2


def test_one_stage_of_several_can_be_selected(corpus: Path) -> None:
    extracted, joined = str(corpus.parent / "out"), str(corpus.parent / "out" / "joined")
    commands = [
        ["extract", str(corpus), extracted, "--processes", "1"],
        ["concatenate", extracted, joined, "--target-files", "2", "--workers", "2", "--processes", "1"],
        *(
            [command, extracted, "--stage", stage]
            for command in ("verify", "status")
            for stage in ("extract", "concatenate", "preprocess")
        ),
    ]
    (_, _, finished, unfinished, absent, *states), _ = run_many(commands)
    assert finished.code == 0 and "of extract in" in finished.out and "concatenate" not in finished.out
    assert unfinished.code == 2 and "1 of 2 units have no receipt" in unfinished.out
    assert absent.code == 2 and "--stage preprocess: no such stage" in absent.err
    assert "started stages: extract, concatenate" in absent.err
    assert [state.code for state in states] == [0, 0, 2]
    assert states[0].out.startswith("extract in ") and len(states[0].out.splitlines()) == 1
    assert "1/2 units" in states[1].out and states[2].err == absent.err


@pytest.mark.slow
def test_output_of_a_file_is_located_by_its_name(corpus: Path) -> None:
    """A chart with an input file and no output directory uses the file's path to select its stage."""
    file = corpus / "0.jsonl"
    commands = [["status", str(file)], ["verify", str(file), "--stage", "preprocess"], ["inspect", str(file)]]
    ended, _ = run_many([["preprocess", str(file), "--tokenizer", str(TOKENIZER)], *commands])
    assert [result.code for result in ended] == [0] * 4, "".join(result.err for result in ended)
    for result in ended[1:]:
        assert str(corpus / "preprocessed") in result.out


def test_last_lines_name_output_and_next_command(corpus: Path) -> None:
    output = corpus.parent / "out"
    ended = tokenmill("extract", corpus, output, "--processes", "2")
    assert ended.code == 0, ended.err
    assert str(output) in ended.out and "next: tokenmill preprocess" in ended.out


@pytest.mark.slow
def test_quarantined_records_are_counted_by_each_command(corpus: Path) -> None:
    (corpus / "4.jsonl").write_text('{"text": "fine"}\n{}\nnonsense\n')
    root = corpus.parent / "out"
    kept = f"2 bad records kept in {root / 'preprocessed' / 'rejected'}"
    options = ["--tokenizer", str(TOKENIZER), "--on-bad-record", "quarantine", "--processes", "1"]
    commands = [[command, str(root)] for command in ("status", "verify", "inspect")]
    ended, _ = run_many([["run", str(corpus), str(root), *options], *commands])
    for result in ended:
        assert result.code == 0 and result.out.count(kept) == 1, result
    made = tokenmill("preprocess", root, "--from", "download", *options)
    assert made.code == 0 and f", {kept} in " in made.out, made


# -- workers


def done_by(ended: CommandResult) -> tuple[int, int, bool]:
    assert ended.code == 0, ended.err
    return ended.result["units_done_now"], ended.result["units_done"], ended.result["complete"]


def test_indexed_pod_gets_its_share_from_the_environment(corpus: Path) -> None:
    command = ["extract", str(corpus), str(corpus.parent / "out"), "--processes", "1", "--json"]
    [second], _ = run_many([command], JOB_COMPLETION_INDEX="1", TOKENMILL_WORKERS="2")
    assert done_by(second) == (2, 2, False)
    # Options take precedence over the environment.
    typed = [*command, "--workers", "2", "--worker-index", "0"]
    (again, invalid, first), _ = run_many([[*command, "--workers", "2"], command, typed], JOB_COMPLETION_INDEX="1")
    assert done_by(again) == (0, 2, False)
    assert invalid.code == 2 and "indices start at 0" in invalid.err
    assert done_by(first) == (2, 4, True)


def test_a_late_pod_of_an_old_job_does_not_replace_the_plan_back(corpus: Path) -> None:
    def join(files: int, job: str) -> CommandResult:
        command = ["concatenate", str(corpus), str(corpus.parent / "out"), "--target-files", str(files), "--replace"]
        return run_many([command], TOKENMILL_RUN=job)[0][0]

    assert [join(2, "old").code, join(3, "new").code] == [0, 0]
    late = join(2, "old")
    assert late.code not in (0, 2) and "another run replaced the plan" in late.err
    assert len(data_of(corpus.parent / "out")) == 3
    refused = join(3, "../new")
    assert refused.code == 2 and "TOKENMILL_RUN" in refused.err


@pytest.mark.slow
def test_text_outside_the_locale_is_processed_and_printed(tmp_path: Path) -> None:
    (tmp_path / "\u65e5.jsonl").write_text('{"text": "\u672c"}\n', encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    made = tokenmill("preprocess", tmp_path, tmp_path / "out", "--tokenizer", TOKENIZER, **plain)
    assert made.code == 0, made.err
    shown = tokenmill("inspect", tmp_path / "out", "--document", "0", **plain)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "\\u672c"), shown.err


# -- formats


@pytest.mark.slow
def test_wide_zstd_windows_are_read_on_request(tmp_path: Path) -> None:
    import zstandard

    source = tmp_path / "in"
    source.mkdir()
    for log in (28, 31):
        parameters = zstandard.ZstdCompressionParameters(window_log=log, enable_ldm=True)
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        (source / f"{log}.jsonl.zst").write_bytes(stream.compress(b'{"text": "a"}\n') + stream.flush())
    refused = tokenmill("extract", source, tmp_path / "out")
    assert refused.code == 2
    assert "--zstd-window 256MiB" in refused.err and "dataset.zstdWindow=2048MiB" in refused.err
    too_small = tokenmill("extract", source, tmp_path / "out", "--zstd-window", "256MiB")
    assert (
        too_small.code == 2 and "--zstd-window 256MiB" not in too_small.err and "--zstd-window 2048MiB" in too_small.err
    )
    assert tokenmill("extract", source, tmp_path / "out", "--zstd-window", "2GiB").code == 0
    assert set(data_of(tmp_path / "out").values()) == {b'{"text": "a"}\n'}


def test_a_size_has_one_meaning_in_every_option() -> None:
    """A unit is a power of 1024, with and without an i: 1MB is 1,048,576 bytes."""
    groups = {
        group
        for module in (options, corpus_options, tokens_options, transform_options, packing_options, chat_options)
        for group in vars(module).values()
        if isinstance(group, type) and dataclasses.is_dataclass(group)
    }
    parsers = {
        name: option.parse
        for group in groups
        for name, hint in get_type_hints(group, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if name.endswith(("_size", "_window")) and option.parse
    }
    assert sorted(parsers) == ["max_record_size", "shard_size", "zstd_window"]
    for parse in parsers.values():
        for text, size in {"1MB": 1 << 20, "1 mb": 1 << 20, "1.5MiB": 3 << 19, "2GB": 2 << 30, "1000": 1000}.items():
            assert parse(text) == size
        for text in ("0", "1e6", "-1", "big", "9" * 5000, "3000PB"):
            with pytest.raises(ValueError, match=r"is not (a size; write it as|between 1 and)"):
                parse(text)


def test_invalid_formats_and_sizes_are_usage_errors(tmp_path: Path) -> None:
    cases = {
        "--format": [["preprocess", "--format", "csv"], ["run", "--format", "JSONL"], ["extract", "--format", "json"]],
        "--txt-document": [
            ["preprocess", "--txt-document", "line"],
            ["preprocess", "--format", "txt", "--txt-document", "page"],
        ],
        "--zstd-window": [["preprocess", "--zstd-window", "4GiB"], ["extract", "--zstd-window", "large"]],
        "--max-record-size": [["preprocess", "--max-record-size", "0"], ["preprocess", "--max-record-size", "-1MB"]],
    }
    for option, commands in cases.items():
        full_commands = [[*command[:1], str(tmp_path), str(tmp_path / "out"), *command[1:]] for command in commands]
        full_commands = [[*c, "--tokenizer", "x"] if c[0] in ("preprocess", "run") else c for c in full_commands]
        for ended in run_many(full_commands)[0]:
            assert (ended.code, f"Invalid value for {option}" in ended.err) == (2, True), ended.err


@pytest.mark.slow
def test_run_reads_files_of_the_format(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "book.txt").write_text("once\n\nupon\n")
    (source / "notes.json").write_text("{}")
    command = ["run", source, tmp_path / "out", "--tokenizer", TOKENIZER, "--format", "txt"]
    joined = tokenmill(*command, "--extract")
    assert joined.code == 2 and "leave out --extract and --concatenate" in joined.err
    ended = tokenmill(*command, "--txt-document", "line", "--max-record-size", "1MB")
    assert ended.code == 0, ended.err
    assert tokenmill("inspect", tmp_path / "out", "--document", "1").out.endswith("\nupon\n")
