"""Checkpoints: tokenmill reads a hostile .metadata without executing any of it, and in bounded time."""

import contextlib
import os
import pickle
import pickletools
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checkpoints import SAVED, only_checkpoint
from support.commandline import tokenmill
from support.torchdist import NOW, metadata, save, write
from tokenmill.checkpoints.metadata import Damage, read_extents
from tokenmill.checkpoints.torch_dist import Checkpoint

COMBINATIONS = [
    b"2\x86\x94",
    b"2\x85\x94",
    b"22\x87\x94",
    b"](22e\x94",
    b"h\x00\x86\x94",
    b"(22t\x94",
    b"(22\x91\x94",
    b"2",
    b"}22s\x94",
]
"""Opcodes that build an object from the top of the stack, or from the first object in the memo, and memoize it."""


class Call:
    """An object that pickles as a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "x" if obj == "persistent" else None


def hostile(path: Path) -> dict[str, bytes]:
    """Return pickles that would create a file if an unpickler executed any of them."""
    bad = path / "executed"
    with open(path / "p", "wb") as file:
        Persistent(file).dump("persistent")
    # GLOBAL 'torch.hub load'; the arguments; REDUCE
    hub = b"ctorch.hub\nload\n(X\x01\x00\x00\x00xtR."
    enum = b"ctorch.distributed.checkpoint.metadata\n"
    return {
        "os.system": pickle.dumps(Call(os.system, f"touch {bad}")),
        "posix.system": b"cposix\nsystem\n(X\x05\x00\x00\x00touchtR.",
        "exec": pickle.dumps(Call(exec, f"open({str(bad)!r}, 'w')")),
        "eval": pickle.dumps({"a": [Call(eval, f"open({str(bad)!r}, 'w')")]}),
        "protocol 0": pickle.dumps(Call(os.system, f"touch {bad}"), 0),
        "inst": b"(S'touch'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'touch'\no.",
        "getattr of a module": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
        "getattr of a class": b"cbuiltins\ngetattr\n(" + enum + b"Metadata\nX\x0e\x00\x00\x00__subclasses__tR.",
        "getattr of getattr": b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nX\x08\x00\x00\x00__self__tR.",
        "dotted": b"\x80\x04\x8c\x04copy\x8c\x12deepcopy.__globals__\x93.",
        "torch.hub": hub,
        "a function that looks like a dtype": b"ctorch\nfloat_power\n.",
        "state into a class": enum + b"Metadata\n}X\x0c\x00\x00\x00storage_data}sb.",
        "state into a function": b"cbuiltins\ngetattr\n(N}X\x0c\x00\x00\x00__defaults__)stb.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": (path / "p").read_bytes(),
        "memory": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
        "not a pickle": b"PK\x03\x04 not a pickle at all",
        **{f"endless: {name}": content for name, content in endless().items()},
    }


def endless() -> dict[str, bytes]:
    """Return small pickles that would keep Python's own unpickler busy for years or exhaust the memory."""
    doubled = b")" + b"2\x86" * 60  # DUP, TUPLE2: a tuple of two copies of the previous object
    remembered = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
    tripled = b")q\x00" + b"".join(b"h%ch%ch%c\x87q%c" % (n, n, n, n + 1) for n in range(60))
    frozen = b"(" + b"N" * 4 + b"\x91" + b"".join(b"\x94(h%ch%c\x86\x91" % (n, n) for n in range(60))
    # All these integers have the hash 0: a dictionary compares each integer with all previous ones.
    collisions = b"".join(b"\x8a\x10" + (n * (2**61 - 1)).to_bytes(16, "little") + b"N" for n in range(20_000))
    floats = b"".join(b"G" + struct.pack(">d", float(n * (2**61 - 1))) + b"N" for n in range(20_000))
    million = b"\x8b" + struct.pack("<i", 1_000_000) + b"\xff" * 999_999 + b"\x7f"
    whole = pickletools.optimize(metadata({"__0_0.distcp": 70}))
    everything = b"ccollections\nOrderedDict\n(" + b"(NNt" * 20_000 + b"l\x94"
    return {
        "a key of tuples": b"\x80\x02}" + doubled + b"Ns.",
        "keys of tuples, many": b"\x80\x02}(" + doubled + b"N" + doubled + b"Nu.",
        "a remembered key": b"\x80\x04}" + remembered + b"Ns.",
        "a key of three": b"\x80\x02}" + tripled + b"Ns.",
        "in a set": b"\x80\x04\x8f(" + doubled + b"\x90.",
        "in a frozen set": b"\x80\x04(" + doubled + b"\x91.",
        "frozen sets within each other": b"\x80\x04" + frozen + b".",
        "in an ordered dict": b"\x80\x02ccollections\nOrderedDict\n)R" + doubled + b"Ns.",
        "as a name": b"\x80\x04" + doubled + doubled + b"\x93.",
        "as a state": b"\x80\x02ctorch\nSize\n)R" + doubled + b"b.",
        "as arguments": b"\x80\x02ctorch\nSize\n" + doubled + b"R.",
        "beside a stretch": whole.replace(b"}", b"}" + doubled + b"Ns", 1),
        "colliding integers": b"\x80\x02}(" + collisions + b"u.",
        "colliding floats": b"\x80\x02}(" + floats + b"u.",
        "a huge integer": b"\x80\x02" + million + b"2}" + b"0" + b"R" * 10 + b".",
        "huge integers as keys": b"\x80\x02}" + million + b"\x94" + b"h\x00Ns" * 20_000 + b".",
        "copies of a long list": b"\x80\x02" + everything + b"h\x000" * 20_000 + b".",
        "lists within each other": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "much to come": b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00x.",
        "a long text to come": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        "a long frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "far away in the memo": b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
        "a memo by its text": b"\x80\x02Np" + b"9" * 100_000 + b"\n.",
    }


def test_hostile_metadata_is_refused_and_not_executed(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    for name, content in hostile(tmp_path).items():
        write(file, content, SAVED + 2)
        checkpoint = only_checkpoint(tmp_path)
        assert not checkpoint.complete and ".metadata" in checkpoint.state, name
        assert (
            name[:10] != "getattr of"
            or "reads an attribute" in checkpoint.state
            or "which no checkpoint" in checkpoint.state
        )
        assert not (tmp_path / "executed").exists(), name
    # The pickle is really hostile: Python's own unpickler executes it.
    pickle.loads(hostile(tmp_path)["os.system"])
    assert (tmp_path / "executed").exists()


@pytest.mark.slow
def test_no_pickle_keeps_the_command_line_busy(tmp_path: Path) -> None:
    for number, content in enumerate(endless().values(), 1):
        write(save(tmp_path, number) / ".metadata", content, NOW + 60 * number + 2)
    last = len(endless())
    ended = tokenmill("checkpoint", "list", tmp_path, "--json")
    assert ended.code == 0, ended
    states = dict(zip(endless(), ended.result["checkpoints"], strict=True))
    assert {name: checkpoint["problems"] for name, checkpoint in states.items() if checkpoint["complete"]} == {}
    for command, code in (("verify", 2), ("repair", 2)):
        ended = tokenmill("checkpoint", command, tmp_path)
        assert (ended.code, "Traceback" in ended.err) == (code, False) and f"iter_{last:07d}" in ended.err, ended


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(COMBINATIONS), max_size=200),
    st.sampled_from([b"}", b"\x8f", b"ccollections\nOrderedDict\n)R"]),
)
def test_recursive_structures_take_bounded_time(parts: list[bytes], last: bytes) -> None:
    """Nest random tuples, lists, sets and dictionaries in each other; then use them as a key or an item."""
    content = b"\x80\x04)\x94" + b"".join(parts) + last + b"h\x00" + b"".join(parts) + b"Ns."
    with contextlib.suppress(Damage):
        read_extents(content)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.text("ab/._0é\n", min_size=1), st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1),
    st.integers(3, pickle.HIGHEST_PROTOCOL),
    st.booleans(),
)
def test_valid_metadata_of_every_protocol_is_read(
    entries: list[tuple[str, int, int]], protocol: int, optimized: bool
) -> None:
    content = metadata(entries, protocol)
    needed = read_extents(pickletools.optimize(content) if optimized else content)
    assert needed == {path: max(start + size for name, start, size in entries if name == path) for path, *_ in entries}


@pytest.mark.slow
def test_large_valid_metadata_is_complete(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    sizes = {f"__{rank}_{part}.distcp": 100 for rank in range(500) for part in range(2)}
    for name, length in sizes.items():
        write(directory / name, bytes(length), SAVED)
    entries = [(name, start, 1) for name in sizes for start in range(10)]
    write(directory / ".metadata", metadata([*entries, *((name, 0, 100) for name in sizes)]), SAVED + 2)
    assert only_checkpoint(tmp_path).complete
    (directory / "__499_1.distcp").unlink()
    assert only_checkpoint(tmp_path).state == "__499_1.distcp is missing"


@pytest.mark.parametrize(
    ("bound", "content", "message"),
    [
        ("MAX_OPCODES", b"\x80\x02" + b"N0" * 50 + b"N.", "more than 60 opcodes"),
        ("MAX_VALUES", b"\x80\x02" + b"}0" * 61 + b"N.", "more than 60 values"),
        ("MAX_DEPTH", b"\x80\x02" + b"(" * 61 + b"t" * 61 + b".", "more than 60 nested collections"),
    ],
)
def test_work_is_bounded(bound: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"tokenmill.core.files.pickles.{bound}", 60)
    if bound != "MAX_OPCODES":
        monkeypatch.setattr("tokenmill.core.files.pickles.MAX_OPCODES", 1000)
    with pytest.raises(Damage, match=message):
        read_extents(content)


def test_refused_name_is_printable(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    write(file, pickle.dumps(Call(os.system, "x")), SAVED + 2)
    assert only_checkpoint(tmp_path).state == ".metadata names posix.system, which no checkpoint needs: do not load it"
    write(file, b"\x80\x04\x8c\x05a\x1b[2J\x8c\x01b\x93.", SAVED + 2)
    assert "\x1b" not in only_checkpoint(tmp_path).state


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_random_damage_to_metadata_is_handled(data: st.DataObject) -> None:
    """Change one to three random bytes: the result is complete or damaged, never an error or a hang."""
    pristine = metadata({"__0_0.distcp": 70, "__1_0.distcp": 77})
    content = bytearray(pristine)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write(save(path, 100) / ".metadata", bytes(content), SAVED + 2)
        assert isinstance(only_checkpoint(path), Checkpoint)
