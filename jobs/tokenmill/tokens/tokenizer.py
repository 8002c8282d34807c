"""A tokenizer as a plan records it: its files copied, its ids' meaning settled, its encoder chosen.

`tokenmill preprocess` resolves once, at plan time, and leaves beside the data

    tokenizer/      the tokenizer's files as they came; training loads these, offline
    backend.json    the backend of the AutoTokenizer made from them, as encoders load it fastest
    encoder.json    the same without the merges that never happen, where there are such (`tokens.merges`)
    special.json    the special tokens that text can spell
    full.json       with `special_in_text` split, the backend with its special tokens: backend.json lacks them then
    resolved.json   ResolvedTokenizer
    verdict.json    tokens.gate.Verdict: the encoder, and why not another

Nothing here imports transformers: that, and whatever a tokenizer from outside may do to it, stays in a
child process (`tokens.resolve`).
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.errors import MachineError, RequestError, TokenmillError, TransientError
from tokenmill.files.codec import content_id, readable_json
from tokenmill.files.explain import TMPDIR, explained
from tokenmill.files.publish import write_atomic
from tokenmill.tokens import cache, engines, merges
from tokenmill.tokens.contract import ResolvedTokenizer as ResolvedTokenizer  # noqa: PLC0414 - part of this module's interface
from tokenmill.tokens.gate import (
    Verdict,
    environment,
    how_it_ended,
    is_installed,
    judge,
    killed_words,
    wait_for,
    was_killed,
)
from tokenmill.tokens.tokenizer_files import fetch, hash_directory, local_directory, or_a_directory, read_directory

TIMEOUT_SECONDS = 600.0
"""How long loading a tokenizer may take; the largest in use take seconds."""

LEAST_ROOM = 1 << 20
"""Bytes that a disk has left which did not fail for being full."""

TEXT_CHARACTERS = 1_000_000
"""Characters of the corpus's first documents that the gate compares, at 3 MB/s of the reference."""

CHAT_TOKENS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|im_sep|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<|end_of_role|>",
        "<|role_end|>",
    )
)
"""Tokens that end a turn of a conversation; instruction-tuned tokenizers name one of them as eos."""


def tokenizer_request(reference: str, revision: str | None) -> dict[str, Any]:
    """Identify what is asked for, without network or transformers: files by hash, or a Hub name.

    A directory is the same request wherever it lies. Raises RequestError for a directory that does not
    exist or holds no tokenizer.
    """
    directory = local_directory(reference, revision)
    if directory is None:
        return {"name": reference, "revision": revision}
    return {"files": hash_directory(directory)}


def resolve_tokenizer(
    reference: str,
    revision: str | None,
    *,
    eod_token: str | None,
    add_special_tokens: bool,
    texts: Sequence[str],
    destination: Path,
    scratch: Path,
    need_eod: bool = True,
    encoder: str = engines.AUTO,
    endpoint: str | None = None,
    source: str | None = None,
    special_in_text: str = "keep",
    say: Callable[[str], None] = lambda text: None,
    cached: bool = False,
) -> tuple[ResolvedTokenizer, Verdict]:
    """Fetch a tokenizer, settle its EOD and dtype, choose an encoder; write all of it to `destination`.

    `reference` is a directory or a Hub name (`revision`: branch, tag or commit; `endpoint` goes before
    HF_ENDPOINT), `texts` the corpus's first documents for the gate, `scratch` a directory for what passes
    between processes. Without `need_eod` a tokenizer may lack an eos token. `source` says which ids are right where
    transformers' class and the tokenizer's own file differ: class, file, or None, for which they may not differ.
    `special_in_text` split has special tokens that text spells encoded as text. `say` takes what a person reads
    who waits. `cached`: what was settled on this machine is taken from `tokens.cache`, and kept there.
    Raises RequestError where the tokenizer cannot be used, TransientError where the Hub cannot be reached, or a process
    was killed.
    """
    if encoder != engines.AUTO:
        engines.get(encoder)
    directory = local_directory(reference, revision)
    if directory is None:
        with or_a_directory(reference):
            commit, files = fetch(reference, revision, endpoint)
    else:
        reference = directory.resolve().name
        commit, files = None, read_directory(directory)

    request = {
        "reference": reference,
        "eod_token": eod_token,
        "need_eod": need_eod,
        "add_special_tokens": add_special_tokens,
        "encoder": encoder,
        "source": source,
        "special_in_text": special_in_text,
    }
    judged = {"engines": list(engines.ENGINES), "versions": versions()}
    key = content_id({**request, **judged, "files": _hashes(files)})
    settled = _from_cache(key) if cached else None
    if settled is None:
        say(f"loading the tokenizer {reference}, and judging encoders against it")
        settled = _settled_anew(files, request | {"texts": _first(texts)}, scratch, say)
        if cached and settled.verdict.lasts:
            cache.store(key, settled.to_files())
    else:
        say(f"the tokenizer {reference} was judged on this machine before, with the same versions")
    resolved = ResolvedTokenizer.of_json(
        {
            "reference": reference,
            "revision": commit,
            "files": _hashes(settled.files),
            "add_special_tokens": add_special_tokens,
            **settled.fields,
        }
    )
    for name, data in settled.files.items():
        write_atomic(destination / "tokenizer" / name, data)
    for name, data in settled.backends.items():
        write_atomic(destination / name, data)
    write_atomic(destination / "special.json", readable_json(settled.special))
    write_atomic(destination / "resolved.json", readable_json(resolved.to_json()))
    write_atomic(destination / "verdict.json", readable_json(settled.verdict.to_json()))
    return resolved, settled.verdict


class SettledTokenizer(NamedTuple):
    """What the child processes make of a tokenizer: the files to keep, and fields of ResolvedTokenizer."""

    files: dict[str, bytes]
    backends: dict[str, bytes]
    fields: dict[str, Any]
    special: list[str]
    verdict: Verdict

    def to_files(self) -> dict[str, bytes]:
        """Return it as the files of a cache's entry."""
        about = {"fields": self.fields, "special": self.special, "verdict": self.verdict.to_json()}
        return {
            "about.json": readable_json(about),
            **{f"tokenizer-{name}": data for name, data in self.files.items()},
            **{f"backend-{name}": data for name, data in self.backends.items()},
        }

    @classmethod
    def of_files(cls, files: dict[str, bytes]) -> "SettledTokenizer":
        """Take it from the files of a cache's entry (ValueError, KeyError, TypeError)."""
        about = json.loads(files["about.json"])

        def of(kind: str) -> dict[str, bytes]:
            return {name.removeprefix(kind): data for name, data in files.items() if name.startswith(kind)}

        verdict = Verdict.from_json(about["verdict"])
        return cls(of("tokenizer-"), of("backend-"), about["fields"], about["special"], verdict)


def versions() -> dict[str, str]:
    """Return the versions that a resolution depends on."""
    packages = {engine.package for engine in engines.ENGINES.values()}
    return {
        name: engines.package_version(name)
        for name in sorted({*packages, "sentencepiece", "tokenmill", "transformers"})
    }


def _hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}


def _from_cache(key: str) -> SettledTokenizer | None:
    """Return what was settled before, None where it is not there or cannot be used any more."""
    files = cache.load(key)
    if files is None:
        return None
    try:
        settled = SettledTokenizer.of_files(files)
    except (ValueError, KeyError, TypeError):
        return None
    return settled if is_installed(settled.verdict.encoder, settled.verdict.version) else None


def _settled_anew(
    files: dict[str, bytes], request: dict[str, Any], scratch: Path, say: Callable[[str], None]
) -> SettledTokenizer:
    scratch.mkdir(parents=True, exist_ok=True)
    with explained(scratch, TMPDIR), tempfile.TemporaryDirectory(dir=scratch, prefix="tokenizer-") as temporary:
        work = Path(temporary)
        (work / "tokenizer").mkdir()
        for name, data in files.items():
            (work / "tokenizer" / name).write_bytes(data)
        fields, verdict = _with_room(work, lambda: _settle(work, request, say))
        special = fields.pop("special", [])
        backends = {path.name: path.read_bytes() for path in merges.files(work)}
        if (work / "full.json").exists():
            backends["full.json"] = (work / "full.json").read_bytes()
        if (work / "written").is_dir():
            files = {path.name: path.read_bytes() for path in sorted((work / "written").iterdir())}
        return SettledTokenizer(files, backends, fields, special, verdict)


def eod_warning(tokenizer: ResolvedTokenizer) -> str | None:
    """Word the warning that the EOD ends a chat turn rather than a document, None where it does not."""
    if tokenizer.eod_token not in CHAT_TOKENS:
        return None
    better = [token for token in tokenizer.eod_candidates if token != tokenizer.eod_token]
    remedy = f"--eod-token '{better[0]}'" if better else "--eod-token and a token that ends documents"
    return (
        f"documents end with {tokenizer.eod_token} ({tokenizer.eod_id}), the eos token of {tokenizer.reference}, which "
        f"ends a turn of a conversation; for base training give {remedy}"
    )


def added_eod_warning(tokenizer: ResolvedTokenizer) -> str | None:
    """Word the warning that documents end with two EOD, None where they end with one."""
    if not tokenizer.adds_eod:
        return None
    return (
        f"the tokenizer {tokenizer.reference} itself ends each text with {tokenizer.eod_token} ({tokenizer.eod_id}), "
        "and the EOD follows it: documents end with two, as with Megatron-LM. For one, give --no-append-eod (in a "
        "chart: --set tokenizer.appendEod=false)"
    )


def decode(backend: Path, ids: Iterable[int]) -> str:
    """Return the text of token ids, special tokens spelled out."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(backend))
    except Exception as error:  # the library raises no other kind
        raise RequestError(f"{backend} is damaged ({error}); run the same tokenmill preprocess again") from error
    return str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _first(texts: Sequence[str]) -> list[str]:
    """Take texts from the front up to TEXT_CHARACTERS; those that have no UTF-8 are no tokenizer's matter."""
    taken, left = [], TEXT_CHARACTERS
    for text in texts:
        if left <= 0:
            break
        part = text[:left]
        try:
            part.encode()
        except UnicodeEncodeError:
            continue
        taken.append(part)
        left -= len(part) + 100  # so that empty texts come to an end, too
    return taken


def _settle(work: Path, request: dict[str, Any], say: Callable[[str], None]) -> tuple[dict[str, Any], Verdict]:
    """Have a child load the tokenizer in `work`, then another judge encoders on it.

    Returns the fields of ResolvedTokenizer that the first finds, and the verdict.
    """
    (work / "request.json").write_text(json.dumps(request))
    environ = environment() | {"HF_HOME": str(work / "home")}
    command = [sys.executable, "-P", "-m", "tokenmill.tokens.resolve", str(work)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
    ) as child:
        try:
            settled = _settled(child, work, request["reference"], say)
        finally:
            child.kill()
    return settled, judge(work, request["encoder"], say=say)


def _with_room(work: Path, settle: Callable[[], tuple[dict[str, Any], Verdict]]) -> tuple[dict[str, Any], Verdict]:
    """Settle; where that fails or an encoder is rejected on a full disk, the disk is to blame."""
    problem: TokenmillError | None = None
    try:
        settled, verdict = settle()
        if not verdict.rejected:
            return settled, verdict
    except TokenmillError as error:
        problem = error
    if shutil.disk_usage(work).free < LEAST_ROOM:
        raise MachineError(
            f"no space left in {work.parent}, {TMPDIR}; free space there and run the same command again"
        ) from problem
    if problem:
        raise problem
    return settled, verdict


def _settled(child: "subprocess.Popen[bytes]", work: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    output = wait_for(
        child, TIMEOUT_SECONDS, lambda seconds: say(f"still loading the tokenizer {name} after {seconds:.0f} s")
    )
    if output is None:
        raise RequestError(
            f"the tokenizer {name} did not load within {TIMEOUT_SECONDS:g} s; check that its files are a tokenizer's"
        )
    ended = how_it_ended(child.returncode, output)
    if was_killed(child.returncode, output):
        raise TransientError(killed_words(f"loading the tokenizer {name}", ended))
    if child.returncode:
        raise RequestError(f"the process loading the tokenizer {name} {ended}; check the tokenizer's files")
    outcome: dict[str, Any] = json.loads((work / "outcome.json").read_bytes())
    if "error" in outcome:
        raise RequestError(outcome["error"])
    settled: dict[str, Any] = outcome["settled"]
    return settled
