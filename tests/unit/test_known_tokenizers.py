"""Known tokenizers: their first output needs no encoder check, and is the same as after a check."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import CommandResult, tokenmill
from support.corpus import text
from tokenmill.core.typed_json import JsonObject
from tokenmill.pipelines import sample
from tokenmill.tokenize import known_tokenizers
from tokenmill.tokenize.resolution import TokenizerRequest
from tokenmill.tokenize.tokenizer import versions
from tokenmill.tokenize.tokenizer_files import read_directory

ROOT = Path(__file__).parents[2]
SAMPLE = Path(sample.__file__).parent / "tokenizer"
CHECKED = "and checking the encoders"
RECORDS = sorted(known_tokenizers.DIRECTORY.glob("*.json"))
ENCODERS = ".tokenmill/preprocess/encoders"


@pytest.fixture
def preprocess(tmp_path: Path) -> Callable[..., CommandResult]:
    """Preprocess with the tokenizer of `tokenmill sample`, with these changes of its settings, and an empty cache."""
    (tmp_path / "a.jsonl").write_bytes(text(0, 50))

    def run(output: str, *options: object, **settings: object) -> CommandResult:
        tokenizer = tmp_path / f"{output}-tokenizer"
        shutil.copytree(SAMPLE, tokenizer)
        config: JsonObject = json.loads((tokenizer / "tokenizer_config.json").read_bytes())
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | settings))
        command = ["preprocess", tmp_path / "a.jsonl", tmp_path / output, "--tokenizer", tokenizer, "--processes", 1]
        result = tokenmill(*command, *options, TOKENMILL_CACHE_DIR=str(tmp_path / f"{output}-cache"))
        assert result.code == 0, result.err
        return result

    return run


@pytest.mark.slow
def test_a_known_tokenizer_gives_the_same_output_without_a_check(
    tmp_path: Path, preprocess: Callable[..., CommandResult]
) -> None:
    assert CHECKED not in preprocess("known").err
    assert CHECKED in preprocess("checked", padding_side="left").err
    pairs = [
        {path.name: path.read_bytes() for path in (tmp_path / out).glob("*.[bi]*")} for out in ("known", "checked")
    ]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 2
    known, checked = (
        {path.name: path.read_bytes() for path in (tmp_path / output / ENCODERS).glob("*/[bh]*.json")}
        for output in ("known", "checked")
    )
    assert known == checked and "backend.json" in known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings", "known"),
    [
        (("--encoder", "hf"), {}, False),
        (("--no-append-eod",), {}, False),
        (("--special-in-text", "split"), {}, False),
        ((), {"add_bos_token": True}, False),
        ((), {"chat_template": "{{ messages[0]['content'] }}", "model_max_length": 77}, True),
    ],
)
def test_other_options_or_settings_need_a_check(
    options: tuple[str, ...], settings: dict[str, object], known: bool, preprocess: Callable[..., CommandResult]
) -> None:
    assert (CHECKED not in preprocess("out", *options, **settings).err) == known


def test_a_record_that_gives_another_backend_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = read_directory(SAMPLE)
    request = TokenizerRequest("sample", None, True, True, "auto", None, "keep")
    (path,) = (path for path in RECORDS if path.name.startswith("sample-"))
    assert known_tokenizers.find_known(files, request, versions()) is not None
    record = json.loads(path.read_bytes())
    record["skeleton"]["normalizer"] = {"type": "Lowercase"}
    (tmp_path / path.name).write_text(json.dumps(record))
    monkeypatch.setattr(known_tokenizers, "DIRECTORY", tmp_path)
    assert known_tokenizers.find_known(files, request, versions()) is None


def test_the_records_are_those_of_the_locked_versions() -> None:
    """After a change of the locks, `make known-tokenizers` checks the encoders and writes the records again."""
    lock = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "locks/runtime.txt").read_text(), re.MULTILINE))
    assert len(RECORDS) >= 10
    for path in RECORDS:
        packages: dict[str, str] = json.loads(path.read_bytes())["packages"]
        assert packages == {name: lock[name] for name in packages}, path.name
