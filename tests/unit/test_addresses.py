"""The address of a bucket is refused wherever only a path works, and is never a local directory with the name `s3:`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commandline import run_in_process, tokenmill
from support.corpus import TOKENIZER
from support.rendering import command_line
from tokenmill import data, data_prep
from tokenmill.cli.commands import address, location
from tokenmill.core.files.user_path import local_path
from tokenmill.errors import RequestError
from tokenmill.samples.identity import DataIdentity
from tokenmill.samples.run_record import write_record

BUCKETS = ("s3://bucket/out", "gs://b/o", "az://c@account/o", "S3://b/o")
ADDRESSES = ("abfss://c@a.dfs.core.windows.net/o", "hf://buckets/me/out", "file:///data/out", "s3:/bucket/out")
ADDRESSES += ("https://user:pa55word@example.com/o?sig=x", "out/s3://bucket", "hdfs://name/o")
SOURCES = {"run": 1, "sft": 1, "download": 1, "transform": 1, "preprocess": 1, "chat": 1, "checkpoint import": 1}
"""Commands whose first argument may be the address of a source."""


def parameters() -> Iterator[tuple[str, ...]]:
    """Yield the command line up to each parameter that is a path: all arguments but sources, and options of paths."""
    pending: list[tuple[str, Any]] = [("", command_line())]
    while pending:
        name, command = pending.pop()
        below = getattr(command, "commands", None) or getattr(command, "parsers", {})
        pending += [(f"{name} {word}".strip(), child) for word, child in below.items()]
        if name and not hasattr(command, "commands"):
            arguments = [item for item in command.params if item.param_type_name == "argument"]
            for number in range(SOURCES.get(name, 0), len(arguments)):
                if arguments[number].type.name not in (location.__name__, address.__name__):
                    yield (*name.split(), *["x"] * number)
            options = [item for item in command.params if item.param_type_name == "option"]
            yield from ((*name.split(), item.opts[0]) for item in options if item.type.name == "path")


@pytest.mark.parametrize("start", list(parameters()), ids=" ".join)
def test_every_path_of_every_command_refuses_an_address(
    start: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_in_process(*start, "s3://bucket/out")
    assert ended.code == 2
    assert "'s3://bucket/out' is an address, but only a path works here" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_of_any_kind_is_no_output(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    ended = run_in_process("extract", "in", address)
    assert ended.code == 2
    assert "buckets and other services are not supported" in ended.err
    assert "pa55word" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("address", BUCKETS)
def test_a_bucket_without_credentials_is_no_local_directory(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    ended = tokenmill("extract", "in", address, AWS_EC2_METADATA_DISABLED="true", NO_GCE_CHECK="true")
    assert ended.code == 2 and "credentials" in ended.err, ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_address_in_a_variable_or_a_resolved_option_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "blend.json").write_text('{"train": ["hdfs://b/part_text_document"], "valid": null, "test": null}')
    (tmp_path / "pack.json").write_text('{"datasets": [{"path": "hdfs://b/chat"}]}')
    before = sorted(tmp_path.iterdir())
    for variables, arguments in (
        ({"TOKENMILL_METRICS_FILE": "s3://b/m.prom"}, "extract in out"),
        ({"TOKENMILL_CACHE_DIR": "s3://b/cache"}, f"preprocess in out --tokenizer {TOKENIZER}"),
        ({}, "preprocess in out --tokenizer s3://b/tokenizer"),
        ({}, "check-data blend.json --seq-length 8"),
        ({}, "pack pack.json out --pack-size 8"),
        ({}, "extract in out --on slurm --profiles s3://b/tokenmill.toml"),
        ({}, "checkpoint import s3://b/model out"),
        ({}, "compare run=s3://b/log"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ended = run_in_process(*arguments.split())
        assert ended.code == 2, ended
        assert "is an address, but only a path works here" in ended.err, ended
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "out"] == before


IDENTITY = DataIdentity(
    kind="pairs",
    sources=(),
    tokenizer="",
    seq_length=2,
    samples=1,
    seed=1,
    split=None,
    part="train",
    surplus=0.0,
)


@pytest.mark.parametrize(
    "call",
    [
        lambda: data.open("hdfs://b/out", seq_length=8),
        lambda: data.open(["out", "hdfs://b/out"], seq_length=8),
        lambda: data.open([(1.0, "hdfs://b/out")], seq_length=8),
        lambda: data.open({"train": Path("s3://b/out")}, seq_length=8),
        lambda: data.open("synthetic:8", seq_length=8, samples=1, index_cache="s3://b/cache"),
        lambda: data_prep.OutputConfig(dir="s3://b/out"),  # type: ignore[arg-type]
        lambda: data_prep.OutputConfig(dir=Path("s3://b/out")),
        lambda: data_prep.DataPrepConfig(output_dir=Path("gs://b/out")),
        lambda: data_prep.DataPrepConfig(blend_path=Path("gs://b/blend.json")),
        lambda: data_prep.DataBlend.load("s3://b/blend.json"),
        lambda: write_record(Path("s3://b/run"), IDENTITY, 1),
    ],
)
def test_python_refuses_an_address(call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="is an address, but only a path works here"):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["out", "/data/out", "a:b/c", "./s3:/b", "/data/s3:/b", "../s3:x", "x=1/y", "date=2024-01-01/a", "http:"]
)
def test_a_path_with_a_colon_stays_a_path(name: str) -> None:
    assert local_path(name, "OUTPUT") == Path(name)


def test_a_directory_that_looks_like_an_address_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    assert tokenmill("extract", "in", "./s3:/out").code == 0
    assert (tmp_path / "s3:/out/a.jsonl").read_text() == '{"text": "a"}\n'
