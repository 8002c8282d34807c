"""The record of a tokenizer in a plan, and the errors for unusable tokenizers."""

import hashlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.corpus import TOKENIZER as TINY
from support.hub import Fault, Hub
from support.tokenizer_files import bytes_vocabulary, write_tokenizer
from tokenmill.errors import RequestError, TransientError
from tokenmill.tokenize.encoders import load_encoder
from tokenmill.tokenize.gate import Verdict
from tokenmill.tokenize.resolve import resolve
from tokenmill.tokenize.tokenizer import ResolvedTokenizer, decode, eod_warning, resolve_tokenizer, tokenizer_request

pytestmark = pytest.mark.slow

FINGERPRINT = "dc43a28c7c22f04448f1a0306b52bd6b4a9baf8a734a3b52b712287c787149a7"
"""The fingerprint in plans of earlier versions; a change would invalidate their outputs."""
COMMON: dict[str, Any] = {"eod_token": None, "add_special_tokens": True, "texts": ["One.", "\ud800", "Two."]}


def refusal(reference: str | Path, tmp_path: Path, revision: str | None = None, **options: Any) -> str:
    """Check that a tokenizer is refused without output; return the message."""
    output, scratch = tmp_path / "made", tmp_path / "scratch"
    with pytest.raises(RequestError) as caught:
        resolve_tokenizer(str(reference), revision, destination=output, scratch=scratch, **(COMMON | options))
    assert caught.value.exit_code == 2
    assert not output.exists()
    return str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResolvedTokenizer, Verdict, Path]:
    """Resolve the tiny tokenizer from a branch of a Hub; the code file next to it must not be downloaded."""
    output = tmp_path_factory.mktemp("tiny")
    files = {path.name: path.read_bytes() for path in TINY.iterdir()}
    with Hub() as hub:
        hub.add_model(
            "org/tiny",
            files | {"evil.py": b"raise SystemExit", "weights.bin": b"\0" * 9, "sub/tokenizer.json": b"{}"},
            lfs=["tokenizer.json"],
        )
        hub.faults.add(Fault(path="tokenizer.json", kind="flip", times=1))
        resolved, verdict = resolve_tokenizer(
            "org/tiny", "main", destination=output / "out", scratch=output / "scratch", endpoint=hub.endpoint, **COMMON
        )
        fetched = {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}
        assert fetched == set(files)
        assert resolved.revision == hub.find("model", "org/tiny").branches["main"]  # type: ignore[union-attr]
    assert not any((output / "scratch").iterdir())
    return resolved, verdict, output / "out"


def test_facts_and_copies(tiny: tuple[ResolvedTokenizer, Verdict, Path]) -> None:
    resolved, verdict, out = tiny
    assert (resolved.reference, resolved.vocab_size, resolved.max_token_id) == ("org/tiny", 4096, 4095)
    assert (resolved.dtype, resolved.eod_id, resolved.eod_token) == ("uint16", 0, "<|endoftext|>")
    assert eod_warning(resolved) is None
    copies = {path.name: path.read_bytes() for path in (out / "tokenizer").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in TINY.iterdir()}
    assert resolved.files == {name: hashlib.sha256(data).hexdigest() for name, data in copies.items()}
    backend = Tokenizer.from_file(str(out / "backend.json")).to_str()
    assert resolved.fingerprint == hashlib.sha256(backend.encode()).hexdigest() == FINGERPRINT
    assert '"merges":["' in (out / "backend.json").read_text()  # encoders load this form fastest
    assert (verdict.encoder, verdict.rejected) == ("fastokens", ())
    assert ResolvedTokenizer.from_json(json.loads((out / "resolved.json").read_text())) == resolved
    assert Verdict.from_json(json.loads((out / "verdict.json").read_text())) == verdict


def test_decode_returns_the_text(tiny: tuple[ResolvedTokenizer, Verdict, Path]) -> None:
    text = "Grüße, 世界 \U0001f44d\r\n"
    ids, _ = load_encoder("hf", tiny[2] / "backend.json", True).encode([text])
    assert decode(tiny[2] / "backend.json", [*ids, 0]) == f"{text}<|endoftext|>"


def test_a_request_needs_no_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tokenizer_request(str(TINY), None)
    assert set(request["files"]) == {"tokenizer.json", "tokenizer_config.json"}
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in TINY.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "notes.txt").write_text("not the tokenizer's")
    assert tokenizer_request(str(copy), None) == request
    (copy / "tokenizer_config.json").write_text("{}")
    assert tokenizer_request(str(copy), None) != request

    monkeypatch.chdir(tmp_path)
    assert tokenizer_request("org/name", "v1") == {"name": "org/name", "revision": "v1"}
    (tmp_path / "org/name").mkdir(parents=True)
    with pytest.raises(RequestError, match="does not contain a tokenizer"):  # a directory has priority over a Hub name
        tokenizer_request("org/name", None)


@pytest.mark.parametrize("reference", ["./missing", "/nowhere/missing", "a/b/c", "../x", "~/x", ""])
def test_a_missing_directory_is_refused(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="no tokenizer directory"):
        tokenizer_request(reference, None)


def test_revision_of_a_directory() -> None:
    with pytest.raises(RequestError, match="no revision"):
        tokenizer_request(str(TINY), "main")


def test_chat_eos_and_bos(tmp_path: Path) -> None:
    """Resolve a tokenizer with BOS and a chat token as EOS; the truncation in its file is ignored."""
    added = {"<|begin|>": 300, "<|im_end|>": 301, "<|endoftext|>": 302}
    chat = write_tokenizer(tmp_path / "chat", bytes_vocabulary(), added, bos="<|begin|>", eos_token="<|im_end|>")
    out = tmp_path / "out"
    resolved, verdict = resolve_tokenizer(str(chat), None, destination=out, scratch=tmp_path, **COMMON)
    assert (resolved.reference, resolved.revision) == ("chat", None)
    assert (resolved.eod_id, resolved.added) == (301, ("<|begin|>",))
    assert "--eod-token '<|endoftext|>'" in str(eod_warning(resolved))
    ids, _ = load_encoder(verdict.encoder, out / "backend.json", True, verdict.guard).encode(["abc"])
    assert ids[0] == 300
    assert len(ids) == 4


def test_encoders_get_no_merges_that_never_happen(tmp_path: Path) -> None:
    """`a bc` never happens, because `a b` is first; backend.json still has `a bc` for Hugging Face."""
    words = {word: 256 + i for i, word in enumerate(("ab", "bc", "abc"))}
    directory = write_tokenizer(tmp_path / "ways", bytes_vocabulary() | words, {"<|endoftext|>": 300})
    tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    tokenizer["model"]["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "out"
    options = COMMON | {"eod_token": "<|endoftext|>"}
    _, verdict = resolve_tokenizer(str(directory), None, destination=out, scratch=tmp_path, **options)
    merges = {
        name: json.loads((out / name).read_bytes())["model"]["merges"] for name in ("backend.json", "encoder.json")
    }
    assert merges["backend.json"] == ["a b", "b c", "a bc", "ab c"]
    assert merges["encoder.json"] == ["a b", "b c", "ab c"]
    assert verdict.encoder == "gigatoken"  # fastokens refuses it with either list


def local_refusal(directory: Path, tmp_path: Path, **fields: Any) -> str:
    """Load a tokenizer that must be refused in this process, which saves an import of transformers per tokenizer."""
    work = tmp_path / f"work-{directory.name}"
    shutil.copytree(directory, work / "tokenizer", dirs_exist_ok=True)
    request = {
        "reference": directory.name,
        "need_eod": True,
        "add_special_tokens": True,
        "texts": [],
        "encoder": "auto",
        "source": None,
        "special_in_text": "keep",
    }
    (work / "request.json").write_text(json.dumps({"eod_token": None} | request | fields))
    with pytest.raises(RequestError) as caught:
        resolve(work)
    return str(caught.value)


def test_unusable_tokenizers(tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path / "bare", bytes_vocabulary(), {"</s>": 300})
    assert "has no eos token; set --eod-token (in its vocabulary: </s>)" in local_refusal(bare, tmp_path)
    message = local_refusal(bare, tmp_path, eod_token="</ss>")
    assert "'</ss>' is not a single token" in message
    assert "similar tokens: </s>" in message
    sparse = write_tokenizer(tmp_path / "sparse", bytes_vocabulary() | {"b": 70_000}, {"<eos>": 300}, eos_token="<eos>")
    message = local_refusal(sparse, tmp_path)
    assert "uint16" in message
    assert "70,000" in message
    broken = write_tokenizer(tmp_path / "broken", {"a": 0})
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unheard-of"}}')
    message = local_refusal(broken, tmp_path)
    assert "cannot load the tokenizer broken" in message
    assert "save_pretrained" in message
    assert str(tmp_path) not in message


def test_hostile_files(tmp_path: Path) -> None:
    """These tokenizers are refused before transformers loads."""
    cases = {
        "{": "is not valid JSON",
        "[" * 200_000: "is not valid JSON",
        "[]": "is not a JSON object",
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}): "requires its own Python code",
    }
    for number, (config, message) in enumerate(cases.items()):
        directory = write_tokenizer(tmp_path / str(number), {"a": 0})
        (directory / "tokenizer_config.json").write_text(config)
        (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        assert message in refusal(directory, tmp_path)
    with (directory / "tokenizer.json").open("wb") as file:
        file.truncate(129 << 20)
    assert "bytes, more than" in refusal(directory, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_hub_refusals(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_model("org/empty", {"README.md": b"nothing here"})
        hub.add_model("org/gated", {"tokenizer.json": b"{}"}, gated=True)
        for name, revision, message in (
            ("org/empty", None, "does not contain a tokenizer"),
            ("org/empty", "v9", "no revision v9"),
            ("org/gated", None, "gated"),
            ("org/absent", None, "the tokenizer org/absent does not exist on the Hub"),
        ):
            assert message in refusal(name, tmp_path, revision, endpoint=hub.endpoint)


def test_a_private_repository_is_explained_by_the_account_of_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub() as hub:
        assert "set HF_TOKEN to the token of an account with access" in refusal(
            "org/absent", tmp_path / "a", endpoint=hub.endpoint
        )
        monkeypatch.setenv("HF_TOKEN", "hf_of_another_account")
        assert "the account of your access token has no access" in refusal(
            "org/absent", tmp_path / "b", endpoint=hub.endpoint
        )


def test_a_name_of_a_missing_directory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with Hub() as hub:
        for name in ("nothere", "data/nothere"):
            message = refusal(name, tmp_path / "made", endpoint=hub.endpoint)
            assert message.startswith(
                f"there is no directory {name!r} here; the tokenizer {name} does not exist on the Hub, "
            )
        assert refusal("org/absent", tmp_path / "made", endpoint=hub.endpoint).startswith(
            "the tokenizer org/absent does not exist on the Hub"
        )


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(TransientError, match="without a network, use a directory"):
            resolve_tokenizer(
                "org/tiny", None, destination=tmp_path / "out", scratch=tmp_path, endpoint=endpoint, **COMMON
            )


def test_unknown_encoder(tmp_path: Path) -> None:
    assert "unknown encoder 'fast'; use one of auto, fastokens, gigatoken, hf" in refusal(
        TINY, tmp_path, encoder="fast"
    )
