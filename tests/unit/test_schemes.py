"""The registry of source schemes: a new entry, and the schemes in documents and charts."""

import re
from pathlib import Path

import pytest

from support.commandline import CommandResult, data_of, run_many
from support.rendering import ROOT
from tokenmill.sources.schemes import Scheme, format_addresses, list_schemes

TOY = """
from tokenmill.sources.retry import RetryableError
from tokenmill.sources.schemes import Authority, Scheme, register
from tokenmill.sources.source import Listing
from tokenmill.engine.contract import RemoteFile

LINES = b'{"text": "toy"}\\n' * 9

class Toy:
    def __init__(self, uri, opening):
        self.uri, self.opening, self.broken = uri, opening, True
    def list(self, revision, patience):
        return Listing(self.uri, self.opening.pinned, [RemoteFile("a/b.jsonl", len(LINES), version="1")])
    def open(self, file, revision, offset, stop=None, *, plain=False):
        return Bytes(self, offset)

class Bytes:
    stop = None
    def __init__(self, toy, offset):
        self.toy, self.offset = toy, offset
    def __iter__(self):
        if self.toy.broken:
            self.toy.broken = False
            yield LINES[:5]
            raise RetryableError("the toy broke")
        yield LINES[self.offset :]

register(Scheme(("toy", "toys"), "__main__:Toy", "toy://BOX", credentials="a toy needs none"))
register(Scheme(("lost",), "no_such_package.sources:Lost", "", extra="lost"))
register(Scheme(("page",), "__main__:Toy", "", Authority.HOST, resolve_alias={"box": "toy://x"}.get))
"""


def run_with_toys(*commands: list[str]) -> list[CommandResult]:
    return run_many(list(commands), TOY)[0]


def test_an_entry_is_enough_for_a_new_scheme(tmp_path: Path) -> None:
    expected = {"b.jsonl": b'{"text": "toy"}\n' * 9}
    outputs = [tmp_path / name for name in "abc"]
    addresses = ["toy://box", "TOYS://box/x", "box"]
    *results, helped, unknown = run_with_toys(
        *(["download", uri, str(output)] for uri, output in zip(addresses, outputs, strict=True)),
        ["download", "--help"],
        ["download", "toi://box", str(tmp_path / "no")],
    )
    assert [(result.code, result.err) for result in results if result.code] == []
    assert [data_of(output) for output in outputs] == [expected] * 3
    assert "toy://BOX" in helped.out
    assert (unknown.code, "az://, toy://BOX or a path" in unknown.err) == (2, True)


def test_messages_name_packages_and_credentials_of_an_entry(tmp_path: Path) -> None:
    missing, password, port, hosted = run_with_toys(
        ["download", "lost://x", str(tmp_path / "a")],
        ["download", "toy://me:s3cret@box", str(tmp_path / "b")],
        ["download", "page://me:s3/cret@box", str(tmp_path / "c")],
        ["download", "page://me:s3cret@box", str(tmp_path / "d")],
    )
    assert (missing.code, password.code, port.code, hosted.code) == (2, 2, 2, 0), hosted.err
    assert (
        "lost:// requires a package that is not installed; run pip install '.[lost]' in the clone of tokenmill"
        in missing.err
    )
    assert "the address of 'toy://box' contains a password; remove the password: a toy needs none" in password.err
    assert "cannot find the host and port in 'page://box'" in port.err
    assert not any("s3cret" in result.out + result.err for result in (password, port, hosted))


@pytest.mark.parametrize("scheme", list_schemes(), ids=lambda scheme: scheme.names[0])
def test_documents_name_each_scheme_and_its_extra(scheme: Scheme) -> None:
    sources = (ROOT / "docs/data.md").read_text().partition("## Sources")[2].partition("\n## ")[0]
    assert scheme.display.removeprefix("a ") in sources
    if scheme.extra:
        assert f"'.[{scheme.extra}]'" in sources
        assert re.search(rf"^{scheme.extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert format_addresses() in (ROOT / "docs/commands.md").read_text()
    if scheme.display.endswith("://"):
        for chart in ("download", "pipeline"):
            assert f"{scheme.display}, " in (ROOT / f"charts/dataset-{chart}/values.yaml").read_text()
