"""Resolve a tokenizer for a plan: copy its files, determine its EOD and dtype, and choose its encoder.

`tokenmill preprocess` resolves the tokenizer once, at plan time (`tokenize.encoder_store`). The resolution writes

    tokenizer/      the tokenizer's files; training loads them, offline
    backend.json    the backend of their AutoTokenizer, in the form that encoders load fastest
    encoder.json    the same without unreachable merges, if the tokenizer has such merges (`tokenize.merges`)
    special.json    the special tokens that a text can contain
    full.json       with `special_in_text` split: the backend with its special tokens, which backend.json then lacks
    resolved.json   ResolvedTokenizer
    verdict.json    gate.Verdict: the encoder, and the reasons against the others

This module does not import transformers. Only a subprocess imports it (`tokenize.resolve`), because the files of a
tokenizer are untrusted.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.explain import TMPDIR, explain_os_errors
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.json_lines import format_json
from tokenmill.core.typed_json import convert_json
from tokenmill.datasets.contract import ResolvedTokenizer as ResolvedTokenizer  # noqa: PLC0414 - part of this module's interface
from tokenmill.errors import MachineError, RequestError, TokenmillError, TransientError
from tokenmill.tokenize import cache, engines, merges
from tokenmill.tokenize.gate import (
    Verdict,
    child_environment,
    describe_exit,
    is_installed,
    killed_message,
    run_parity_gate,
    wait_for_child,
    was_killed,
)
from tokenmill.tokenize.known_tokenizers import find_known
from tokenmill.tokenize.resolution import ResolveOutcome, TokenizerRequest, TokenizerResolution
from tokenmill.tokenize.tokenizer_files import (
    fetch,
    hash_directory,
    hint_missing_directory,
    local_directory,
    read_directory,
)

TIMEOUT_SECONDS = 600.0
"""Time that a subprocess has to load a tokenizer. The largest known tokenizers need seconds."""

MIN_FREE_BYTES = 1 << 20
"""Free space below which a failure means that the disk is full."""

MAX_CORPUS_CHARACTERS = 1_000_000
"""Number of characters of the corpus's first documents in the gate; the reference encodes 3 MB/s."""

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
"""Tokens that end a turn of a conversation; one of them is the eos token of instruction-tuned tokenizers."""


GateTexts = Sequence[str] | Callable[[Path], Sequence[str]]
"""Texts of the corpus for the parity gate, or a function that makes them from the directory of the tokenizer."""


def tokenizer_request(reference: str, revision: str | None) -> dict[str, object]:
    """Return the identity of the requested tokenizer, without network or transformers: file hashes, or a Hub name.

    The path of a directory is not part of its identity.

    Raises:
        RequestError: the directory does not exist, or does not contain a tokenizer.
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
    texts: GateTexts,
    destination: Path,
    scratch: Path,
    need_eod: bool = True,
    encoder: str = engines.AUTO,
    endpoint: str | None = None,
    source: str | None = None,
    special_in_text: str = "keep",
    log: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
    use_cache: bool = False,
) -> tuple[ResolvedTokenizer, Verdict]:
    """Fetch a tokenizer, determine its EOD and dtype, and choose an encoder; write the result to `destination`.

    `reference` is a directory or a Hub name, and `revision` a branch, tag or commit. `endpoint` replaces HF_ENDPOINT.
    `texts` are the corpus's first documents for the gate, and `scratch` is a directory for files between processes.
    Without `need_eod`, a tokenizer need not have an eos token. `source` selects the ids if transformers' class and the
    tokenizer's file differ: class, file, or None, which raises RequestError for a difference. With `special_in_text`
    split, encoders treat special tokens in texts as ordinary text. `log` prints the progress, and `detail` the use of
    the cache. `use_cache` reads and writes the results in `tokenize.cache`, and reads those of `known_tokenizers`.

    Raises:
        RequestError: the tokenizer cannot be used.
        TransientError: the Hub cannot be reached, or another process killed a subprocess.
    """
    if encoder != engines.AUTO:
        engines.get(encoder)
    directory = local_directory(reference, revision)
    if directory is None:
        with hint_missing_directory(reference):
            commit, files = fetch(reference, revision, endpoint)
    else:
        reference = directory.resolve().name
        commit, files = None, read_directory(directory)

    request = TokenizerRequest(
        reference=reference,
        eod_token=eod_token,
        need_eod=need_eod,
        add_special_tokens=add_special_tokens,
        encoder=encoder,
        source=source,
        special_in_text=special_in_text,
    )
    identity = {name: value for name, value in msgspec.structs.asdict(request).items() if name != "texts"}
    packages = versions()
    libraries = {"engines": list(engines.ENGINES), "versions": packages}
    key = content_id({**identity, **libraries, "files": _hash_files(files)})
    resolution = _load_from_cache(key) if use_cache else None
    if resolution is not None:
        detail(f"using the cached resolution of the tokenizer {reference}: the library versions are the same")
    elif use_cache and (resolution := find_known(files, request, packages)):
        detail(f"the encoders of the tokenizer {reference} were checked for this version of tokenmill")
        cache.store(key, resolution.to_files())
    else:
        log(f"loading the tokenizer {reference} and checking the encoders")
        resolution = _resolve_in_scratch(files, request, texts, scratch, log)
        if use_cache and resolution.verdict.is_repeatable:
            cache.store(key, resolution.to_files())
    resolved = ResolvedTokenizer.from_json(
        {
            "reference": reference,
            "revision": commit,
            "files": _hash_files(resolution.files),
            "add_special_tokens": add_special_tokens,
            **resolution.fields.to_json(),
        }
    )
    for name, data in resolution.files.items():
        write_atomic(destination / "tokenizer" / name, data)
    for name, data in resolution.backends.items():
        write_atomic(destination / name, data)
    write_atomic(destination / "special.json", readable_json(resolution.special_tokens))
    write_atomic(destination / "resolved.json", readable_json(resolved.to_json()))
    write_atomic(destination / "verdict.json", readable_json(resolution.verdict.to_json()))
    return resolved, resolution.verdict


def versions() -> dict[str, str]:
    """Return the versions of the packages that a resolution depends on."""
    packages = {engine.package for engine in engines.ENGINES.values()}
    return {
        name: engines.package_version(name)
        for name in sorted({*packages, "sentencepiece", "tokenmill", "transformers"})
    }


def _hash_files(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}


def _load_from_cache(key: str) -> TokenizerResolution | None:
    """Return a resolution from the cache; None if it is missing, invalid, or of an encoder that is not installed."""
    files = cache.load(key)
    if files is None:
        return None
    try:
        resolution = TokenizerResolution.from_files(files)
    except (ValueError, KeyError, TypeError):
        return None
    return resolution if is_installed(resolution.verdict.encoder, resolution.verdict.version) else None


def _resolve_in_scratch(
    files: dict[str, bytes], request: TokenizerRequest, texts: GateTexts, scratch: Path, log: Callable[[str], None]
) -> TokenizerResolution:
    scratch.mkdir(parents=True, exist_ok=True)
    with explain_os_errors(scratch, TMPDIR), tempfile.TemporaryDirectory(dir=scratch, prefix="tokenizer-") as temporary:
        work = Path(temporary)
        (work / "tokenizer").mkdir()
        for name, data in files.items():
            (work / "tokenizer" / name).parent.mkdir(exist_ok=True)
            (work / "tokenizer" / name).write_bytes(data)
        selected = _select_texts(texts(work / "tokenizer") if callable(texts) else texts)
        order = msgspec.structs.replace(request, texts=selected)
        outcome, verdict = _check_free_space(work, lambda: _run_subprocesses(work, order, log))
        assert outcome.fields is not None  # noqa: S101 - there is no error
        backends = {path.name: path.read_bytes() for path in merges.encoder_files(work)}
        if (work / "full.json").exists():
            backends["full.json"] = (work / "full.json").read_bytes()
        if (work / "written").is_dir():
            written = [path for path in sorted((work / "written").rglob("*")) if path.is_file()]
            files = {path.relative_to(work / "written").as_posix(): path.read_bytes() for path in written}
        return TokenizerResolution(files, backends, outcome.fields, outcome.special, verdict)


def eod_warning(tokenizer: ResolvedTokenizer) -> str | None:
    """Return the warning that the EOD ends a chat turn and not a document; None if it does not end a chat turn."""
    if tokenizer.eod_token not in CHAT_TOKENS:
        return None
    candidates = [token for token in tokenizer.eod_candidates if token != tokenizer.eod_token]
    remedy = f"--eod-token '{candidates[0]}'" if candidates else "--eod-token to a token that ends documents"
    return (
        f"documents end with {tokenizer.eod_token} ({tokenizer.eod_id}), the eos token of {tokenizer.reference}, which "
        f"ends a turn of a conversation; for base training, set {remedy}"
    )


def added_eod_warning(tokenizer: ResolvedTokenizer) -> str | None:
    """Return the warning that documents end with two EOD tokens; None if they end with one."""
    if not tokenizer.adds_eod:
        return None
    return (
        f"the tokenizer {tokenizer.reference} already appends {tokenizer.eod_token} ({tokenizer.eod_id}) to each text, "
        "and tokenmill appends the EOD again: documents end with two EOD tokens, as with Megatron-LM. For one EOD "
        "token, use --no-append-eod (in a chart: --set tokenizer.appendEod=false)"
    )


def load_backend(backend: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a backend JSON, whose ids can be decoded."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(backend))
    except Exception as error:  # the library raises only this type
        raise RequestError(f"{backend} is damaged ({error}); run the stage that made it again") from error


def decode(backend: Path, ids: Iterable[int]) -> str:
    """Return the text of token ids, including special tokens."""
    return str(load_backend(backend).decode([int(i) for i in ids], skip_special_tokens=False))


def _select_texts(texts: Sequence[str]) -> list[str]:
    """Return the first texts, up to MAX_CORPUS_CHARACTERS, without the texts that have no UTF-8 form."""
    selected, remaining = [], MAX_CORPUS_CHARACTERS
    for text in texts:
        if remaining <= 0:
            break
        part = text[:remaining]
        try:
            part.encode()
        except UnicodeEncodeError:
            continue
        selected.append(part)
        remaining -= len(part) + 100  # the constant limits the number of empty texts
    return selected


def _run_subprocesses(
    work: Path, request: TokenizerRequest, log: Callable[[str], None]
) -> tuple[ResolveOutcome, Verdict]:
    """Load the tokenizer of `work` in a subprocess, then run the parity gate in another one."""
    if find_spec("tokenizers") is None:  # a subprocess would end as if the tokenizer's files were damaged
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")
    (work / "request.json").write_text(format_json(request))
    environ = child_environment() | {"HF_HOME": str(work / "home")}
    command = [sys.executable, "-P", "-m", "tokenmill.tokenize.resolve", str(work)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
    ) as child:
        try:
            outcome = _wait_for_outcome(child, work, request.reference, log)
        finally:
            child.kill()
    return outcome, run_parity_gate(work, request.encoder, log=log)


def _check_free_space(
    work: Path, run_subprocesses: Callable[[], tuple[ResolveOutcome, Verdict]]
) -> tuple[ResolveOutcome, Verdict]:
    """Call a function; if it fails or rejects an encoder while the disk is full, raise MachineError for the disk."""
    failure: TokenmillError | None = None
    try:
        outcome, verdict = run_subprocesses()
        if not verdict.rejected:
            return outcome, verdict
    except TokenmillError as error:
        failure = error
    if shutil.disk_usage(work).free < MIN_FREE_BYTES:
        raise MachineError(
            f"no space left in {work.parent}, {TMPDIR}; free space there and run the same command again"
        ) from failure
    if failure:
        raise failure
    return outcome, verdict


def _wait_for_outcome(
    child: "subprocess.Popen[bytes]", work: Path, name: str, log: Callable[[str], None]
) -> ResolveOutcome:
    output = wait_for_child(
        child, TIMEOUT_SECONDS, lambda seconds: log(f"still loading the tokenizer {name} after {seconds:.0f} s")
    )
    if output is None:
        raise RequestError(
            f"the tokenizer {name} did not load within {TIMEOUT_SECONDS:g} s; check that its files belong to "
            "a tokenizer"
        )
    exit_description = describe_exit(child.returncode, output)
    if was_killed(child.returncode, output):
        raise TransientError(killed_message(f"that loads the tokenizer {name}", exit_description))
    if child.returncode:
        raise RequestError(
            f"the process that loads the tokenizer {name} {exit_description}; check the tokenizer's files"
        )
    outcome = convert_json(json.loads((work / "outcome.json").read_bytes()), ResolveOutcome)
    if outcome.error:
        raise RequestError(outcome.error)
    return outcome
