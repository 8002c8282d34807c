"""Files that a user names and that are read whole: a pipe or a device in their place ends the command at once."""

import os
from pathlib import Path

import pytest

from support.commandline import tokenmill

COMMANDS = {
    "--profiles": "extract in out --on slurm --profiles named",
    "status --profiles": "status in --on team --profiles named",
    "--custom": "fit --model custom --custom named --gpus 8 --gpu-memory 80",
    "--check": "fit --check named",
    "a blend": "pack named.json out --pack-size 8",
    "settings": "train named --dry-run",
}


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_special_file_is_refused(command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / ("named.json" if "named.json" in command else "named")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    ended = tokenmill(*command.split(), timeout=200)
    assert ended.code == 2, ended
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["--on kubernetes", "--on team", "--on slurm --profiles tokenmill.toml"])
def test_a_missing_file_of_profiles_is_named(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = tokenmill("extract", "in", "out", *options.split())
    assert ended.code == 2, ended
    assert "tokenmill.toml does not exist" in ended.err, ended


@pytest.mark.parametrize("kind", ["pipe", "device", "large file"])
def test_the_file_of_a_webhook_is_a_small_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    if kind == "pipe":
        os.mkfifo("url")
    elif kind == "device":
        Path("url").symlink_to("/dev/zero")
    else:
        Path("url").write_bytes(b"http://x/" + bytes(1 << 20))
    ended = tokenmill("extract", "in", "out", "--notify-url-file", "url", timeout=200)
    assert ended.code == 0, ended
    assert "warning: cannot read the URL in url: it " in ended.err
    assert "the end will not be announced" in ended.err
