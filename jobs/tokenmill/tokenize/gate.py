"""The parity gate: tokenmill accepts an encoder only if it gives Hugging Face's ids for every text of the gate.

`tokenize.resolve` writes the texts (adversarial texts from this module, and the first documents of the corpus) and
Hugging Face's ids of these texts into a directory. Each candidate then encodes the texts in a subprocess (`python -m
tokenmill.tokenize.gate DIRECTORY NAME...`), so a crash or a hang becomes a rejection and does not stop the planner.
`tokenize.tokenizer` stores the verdict; `tokenize.encoder_store` reads it for the workers.
"""

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from tokenmill.core.machine import describe_memory, ignore_stop_signals
from tokenmill.core.redaction import SECRET_NAME
from tokenmill.core.typed_json import decode_json
from tokenmill.engine.contract import Record
from tokenmill.errors import RequestError, TransientError
from tokenmill.tokenize import engines
from tokenmill.tokenize.encoders import format_guard, load_encoder, optimize_backend
from tokenmill.tokenize.engines.base import EncoderUnavailable, add_surrounding_ids, concatenate_encodings
from tokenmill.tokenize.merges import write_encoder_file

if TYPE_CHECKING:
    from tokenmill.tokenize.engines.base import Encoder, Ids, Offsets

TIMEOUT_SECONDS = 300.0
"""Time that a candidate has for the gate. The slowest candidate needs seconds on an idle machine."""

MAX_GUARDED_CHARACTERS = 16_384
"""Maximum number of characters in a guard; the gate rejects an encoder that differs on more characters.

A library with a later Unicode version than Hugging Face's differs on the characters that this version added: 4,657
characters for gigatoken and Llama 3.
"""

LONG_RUN_BYTES, MEDIUM_RUN_BYTES, SHORT_RUN_BYTES = 1_000_000, 100_000, 20_000
PROBES_PER_TEXT = 64
"""Number of probes that the gate joins into one text; an encoder must encode 60,000 probes."""
SLICE_CHARACTERS = 1_000_000
"""Characters that Hugging Face encodes at a time: its encodings use 100 bytes or more per token."""

TIMED_OUT = "did not finish within"
PROGRESS_INTERVAL_SECONDS = 20.0
"""Interval of the log lines that report what a planner still waits for."""

EXTERNAL_SIGNALS = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals that the system or an operator sends to a process. They do not indicate a fault of the process itself."""

OUT_OF_MEMORY_PATTERN = re.compile(
    r"memory allocation of \d+ bytes failed|MemoryError|bad_alloc|Cannot allocate memory"
)
"""Messages that Rust, Python and C++ write to standard error before they exit because memory ran out."""

REFUSAL_PREFIX = "cannot be used"
"""Prefix of the rejection reason for an encoder that refuses a tokenizer."""


class Rejection(Record, frozen=True):
    """The reason why the gate rejected an encoder; the other fields are empty if the encoder returned no ids.

    `part` names the part of the gate's texts that contains the differing text.
    """

    encoder: str
    version: str
    reason: str
    text: str = ""
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    part: str = ""

    def __str__(self) -> str:
        message = f"{self.encoder} {self.version} {self.reason}"
        if self.text:
            message += f" on {self.text} ({self.part}; expected {list(self.expected)}, got {list(self.got)})"
        return message


class Verdict(Record, frozen=True):
    """The encoder that the gate accepted, and the number of texts it checked.

    `guard` is the argument of load_encoder that names the characters to leave to Hugging Face.
    """

    encoder: str
    version: str
    checked: int
    guard: str = ""
    rejected: tuple[Rejection, ...] = ()

    @property
    def is_repeatable(self) -> bool:
        """Return whether another run of the gate gives the same verdict: no encoder crashed, hung or was killed."""
        return all(rejection.text or rejection.reason.startswith(REFUSAL_PREFIX) for rejection in self.rejected)


class GateQuestion(Struct, frozen=True, kw_only=True):
    """The texts that the candidates encode: texts by part, and chunks of code point probes; `end` follows each text.

    `order` has the candidates. `normalizes` is true for a tokenizer with a normalizer.
    """

    order: Sequence[str]
    parts: dict[str, list[str]]
    chunks: Sequence[Sequence[str]]
    normalizes: bool
    add_special_tokens: bool
    end: int | None


class GateAnswer(Struct, frozen=True):
    """The result of a candidate; `refused` is true for one that does not load the tokenizer."""

    version: str
    checked: int = 0
    guard: str = ""
    rejected: Rejection | None = None
    refused: bool = False


def fallback_warning(verdict: Verdict) -> str | None:
    """Return the warning that the gate rejected a faster encoder; None if it accepted the first candidate."""
    if not verdict.rejected:
        return None
    reasons = "; ".join(map(str, verdict.rejected))
    return (
        f"encoding with {verdict.encoder} {verdict.version}: {reasons}. The output is the same, only the speed differs."
    )


def run_parity_gate(
    directory: Path,
    encoder: str = engines.AUTO,
    *,
    timeout: float = TIMEOUT_SECONDS,
    log: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Return the first candidate that gives the reference ids in a directory for all texts.

    `write_gate_files` wrote the directory. An `encoder` other than "auto" is the only candidate.

    Raises:
        RequestError: no candidate agrees.
        TransientError: another process killed the subprocess, so the gate has no verdict on the candidate.
    """
    names = list(_read_question(directory).order) if encoder == engines.AUTO else [encoder]
    rejected: list[Rejection] = []
    while names:
        exit_description, killed = _run_candidates(directory, names, timeout, log)
        for name in names[:]:
            if killed and not (directory / f"answer-{name}.json").exists():
                raise TransientError(killed_message(f"that checks the encoder {name}", exit_description))
            names.remove(name)
            answer = _read_answer(directory, name, exit_description)
            if answer.rejected is None:
                return Verdict(name, answer.version, answer.checked, answer.guard, tuple(rejected))
            rejected.append(answer.rejected)
            if not answer.refused:  # the subprocess ended at this candidate
                break
    reasons = "; ".join(map(str, rejected))
    if encoder == engines.AUTO:
        raise RequestError(
            f"no encoder gives the ids of the tokenizer's own library: {reasons}; use another tokenizer, or report a "
            "bug of tokenmill"
        )
    raise RequestError(f"--encoder {encoder} cannot be used with this tokenizer: {reasons}; use --encoder auto")


def _run_candidates(directory: Path, names: list[str], timeout: float, log: Callable[[str], None]) -> tuple[str, bool]:
    """Run candidates in a subprocess, one after another, until one of them loads the tokenizer.

    Returns a description of how the subprocess ended, and whether another process or a lack of memory killed it.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenmill.tokenize.gate", str(directory), *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=child_environment(),
    ) as process:
        try:
            output = wait_for_child(
                process, timeout, lambda seconds: log(f"still checking the encoders after {seconds:.0f} s")
            )
        finally:
            process.kill()
    if output is None:
        return f"{TIMED_OUT} {timeout:g} s", False
    return describe_exit(process.returncode, output), was_killed(process.returncode, output)


def wait_for_child(
    process: "subprocess.Popen[bytes]", timeout: float, report_progress: Callable[[float], None]
) -> str | None:
    """Wait for a subprocess; return its standard error, or None after the timeout.

    The function calls `report_progress` with the elapsed seconds every PROGRESS_INTERVAL_SECONDS.
    """
    start = time.monotonic()
    while True:
        try:
            _, output = process.communicate(
                timeout=min(PROGRESS_INTERVAL_SECONDS, max(0.0, start + timeout - time.monotonic()))
            )
        except subprocess.TimeoutExpired:
            if time.monotonic() >= start + timeout:
                return None
            report_progress(time.monotonic() - start)
        else:
            return (output or b"").decode(errors="replace")


def was_killed(returncode: int, output: str) -> bool:
    """Return whether another process or a lack of memory ended a subprocess: another attempt may succeed."""
    return (
        -returncode in EXTERNAL_SIGNALS
        or _was_interrupted(output)
        or (returncode != 0 and OUT_OF_MEMORY_PATTERN.search(output) is not None)
    )


def describe_exit(returncode: int, output: str) -> str:
    """Return a description of how a subprocess failed, as the predicate of a sentence."""
    if returncode and (match := OUT_OF_MEMORY_PATTERN.search(output)):
        return f"ran out of memory ({match.group()})"
    if _was_interrupted(output):
        return "was killed (SIGINT)"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in signal.valid_signals() else f"signal {-returncode}"
        return f"was killed ({name})" if -returncode in EXTERNAL_SIGNALS else f"crashed ({name})"
    last_line = output.strip().splitlines()[-1:] or [f"exit code {returncode}"]
    return f"failed: {last_line[0][:300]}"


def _was_interrupted(output: str) -> bool:
    """Return whether SIGINT arrived before the subprocess ignored it."""
    return output.rstrip().endswith("KeyboardInterrupt")


def killed_message(activity: str, exit_description: str) -> str:
    """Return the message of the error that a subprocess was killed; `activity` is a relative clause."""
    return (
        f"the process {activity} {exit_description} ({describe_memory()}): another process sent a signal, or the "
        "memory is too small; run the same command again. If the error repeats, raise the memory limit (in a chart: "
        "--set resources.limits.memory=4Gi)"
    )


def _read_question(directory: Path) -> GateQuestion:
    return decode_json((directory / "question.json").read_bytes(), GateQuestion)


def _read_answer(directory: Path, name: str, exit_description: str) -> GateAnswer:
    try:
        return decode_json((directory / f"answer-{name}.json").read_bytes(), GateAnswer)
    except (OSError, ValueError):
        version = encoder_version(name)
        return GateAnswer(version, rejected=Rejection(name, version, exit_description))


def encoder_version(name: str) -> str:
    """Return the installed version of an encoder's package, or "none" if the package is not installed."""
    return engines.package_version(engines.get(name).package)


def is_installed(encoder: str, version: str) -> bool:
    """Return whether an encoder's package is installed in this version.

    The function first looks for pip's dist-info directory, because the import of importlib.metadata takes as long as
    all other work of a worker on its plan.
    """
    if encoder not in engines.ENGINES:  # another version of tokenmill has this engine
        return False
    spec = importlib.util.find_spec(engines.get(encoder).package)
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        if package.with_name(f"{package.name}-{version}.dist-info").is_dir():
            return True
    return encoder_version(encoder) == version


def child_environment() -> dict[str, str]:
    """Return the environment of a subprocess that loads a tokenizer: no secrets, no network, no log output."""
    variables = {key: value for key, value in os.environ.items() if not SECRET_NAME.search(key)}
    return variables | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "USE_TORCH": "0",
        "USE_TF": "0",
        "USE_FLAX": "0",
    }


def write_gate_files(
    directory: Path,
    backend: str,
    parts: dict[str, list[str]],
    add_special_tokens: bool,
    encode: Callable[..., Any],
    *,
    end: int | None = None,
    encoder: str = engines.AUTO,
) -> None:
    """Write backend.json as workers load it, the gate's texts, and the reference ids.

    `encode` takes texts and returns Hugging Face encodings: the reference. Candidates must append `end` to the ids of
    each text. The function adds a sample of all code points to the parts.
    """
    import numpy as np

    order, normalizes = _write_backend(directory, backend)
    chunks = _group_probes(code_point_probes(normalizes))
    question = GateQuestion(
        order=order if encoder == engines.AUTO else [encoder],
        parts=parts,
        chunks=chunks,
        normalizes=normalizes,
        add_special_tokens=add_special_tokens,
        end=end,
    )
    (directory / "question.json").write_bytes(msgspec.json.encode(question))

    texts = [*_list_texts(parts), *map("".join, chunks)]
    ends = list(accumulate(map(len, texts)))
    slices, first = [], 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or ends[i] - (ends[first - 1] if first else 0) > SLICE_CHARACTERS:
            slices.append(concatenate_encodings(encode(texts[first:i])))
            first = i
    lengths = [np.diff(offsets) for _, offsets in slices]
    ids, offsets = np.concatenate([ids for ids, _ in slices]), np.cumsum(np.concatenate([[0], *lengths]))
    np.savez(directory / "reference.npz", ids=ids, offsets=offsets.astype(np.int64))


def _write_backend(directory: Path, backend: str) -> tuple[tuple[str, ...], bool]:
    """Write backend.json as workers load it; return the engines in order, and whether it has a normalizer."""
    import orjson

    value = orjson.loads(backend)
    (directory / "backend.json").write_bytes(orjson.dumps(optimize_backend(value)))
    normalizer = value["normalizer"] or {}
    return engines.by_speed(value["pre_tokenizer"]), bool(normalizer) and normalizer.get("normalizers") != []


def compare_with_reference(name: str, directory: Path) -> GateAnswer:
    """Compare an encoder with the reference ids in a directory; return the answer that `run_parity_gate` reads."""
    import numpy as np

    question = _read_question(directory)
    end = question.end
    plain, chunks, add = _list_texts(question.parts), question.chunks, question.add_special_tokens
    texts = [*plain, *map("".join, chunks)]
    backend = directory / "backend.json"
    answer = GateAnswer(encoder_version(name), len(texts))
    if name != engines.REFERENCE:
        write_encoder_file(backend)
    try:
        encoder = load_encoder(name, backend, add, end=end)
    except EncoderUnavailable as error:
        rejection = Rejection(name, answer.version, f"{REFUSAL_PREFIX}: {error}")
        return msgspec.structs.replace(answer, rejected=rejection, refused=True)

    encoded, unstable = _encode_twice(encoder, texts)
    with np.load(directory / "reference.npz") as reference:
        exact = add_surrounding_ids(reference["ids"], reference["offsets"], [], [] if end is None else [end])
    wrong = _differing_texts(encoded, exact)
    if name != engines.REFERENCE and any(i >= len(plain) for i in wrong):
        hf = load_encoder(engines.REFERENCE, backend, add, end=end)
        guard = _find_guarded_characters(encoder, hf, question.normalizes)
        if 0 < len(guard) <= MAX_GUARDED_CHARACTERS:
            answer = msgspec.structs.replace(answer, guard=format_guard(guard))
            encoder = load_encoder(name, backend, add, answer.guard, end=end)
            # Remove the guarded probes from the chunks. Hugging Face would encode the other probes of the chunk too.
            wrong_chunks = [i - len(plain) for i in wrong if i >= len(plain)]
            unguarded = ["".join(p for p in chunks[i] if not guard.intersection(p)) for i in wrong_chunks]
            more, more_offsets = hf.encode(unguarded)
            ids, offsets = exact
            plain_end = offsets[len(plain)]
            texts = [*plain, *unguarded]
            exact = (
                np.concatenate([ids[:plain_end], more]),
                np.concatenate([offsets[: len(plain)], more_offsets + plain_end]),
            )
            encoded, unstable = _encode_twice(encoder, texts)
            wrong = _differing_texts(encoded, exact)
    if not wrong and not unstable:
        return answer
    first = (wrong or unstable)[0]
    expected = exact[0][exact[1][first] : exact[1][first + 1]]
    got, _ = encoder.encode([texts[first]])
    parts = zip(question.parts, accumulate(map(len, question.parts.values())), strict=True)
    part = next((part for part, part_end in parts if first < part_end), "code points")
    reason = "differs from Hugging Face" if wrong else "gives other ids when it encodes the text again"
    shown = describe_difference(texts[first], expected, got, backend, add)
    rejection = Rejection(name, answer.version, reason, shown.text, shown.expected, shown.got, part)
    return msgspec.structs.replace(answer, rejected=rejection)


def _list_texts(parts: dict[str, list[str]]) -> list[str]:
    return [text for texts in parts.values() for text in texts]


def _group_probes(probes: Sequence[str]) -> list[Sequence[str]]:
    return [probes[i : i + PROBES_PER_TEXT] for i in range(0, len(probes), PROBES_PER_TEXT)]


def _encode_twice(encoder: "Encoder", texts: list[str]) -> tuple[tuple["Ids", "Offsets"], list[int]]:
    """Encode texts; return the ids, and the indices of the texts that have other ids the second time.

    The second time, the encoder has warm caches and gets small batches, without the long texts.
    """
    import numpy as np

    encoded = ids, offsets = encoder.encode(texts)
    unstable = []
    short = (
        [i for i, text in enumerate(texts) if len(text) < SHORT_RUN_BYTES] if encoder.name != engines.REFERENCE else []
    )
    for first in range(0, len(short), PROBES_PER_TEXT):
        batch = short[first : first + PROBES_PER_TEXT]
        repeated, starts = encoder.encode([texts[i] for i in batch])
        unstable += [
            i
            for i, low, high in zip(batch, starts[:-1], starts[1:], strict=True)
            if not np.array_equal(repeated[low:high], ids[offsets[i] : offsets[i + 1]])
        ]
    return encoded, unstable


def _find_guarded_characters(encoder: "Encoder", exact: "Encoder", normalizes: bool) -> set[str]:
    """Return the characters on which an encoder differs from the exact one, out of all assigned characters."""
    chunks = _group_probes(code_point_probes(normalizes, complete=True))
    texts = ["".join(chunk) for chunk in chunks]
    suspects = [probe for i in _differing_texts(encoder.encode(texts), exact.encode(texts)) for probe in chunks[i]]
    differing = _differing_texts(encoder.encode(suspects), exact.encode(suspects))
    return {c for i in differing for c in suspects[i] if not c.isascii() and c not in (ACUTE, DOT_BELOW)}


def _differing_texts(encoded: tuple["Ids", "Offsets"], exact: tuple["Ids", "Offsets"]) -> list[int]:
    """Return the indices of the texts for which two encoders give different ids."""
    import numpy as np

    (a, a_offsets), (b, b_offsets) = encoded, exact
    if np.array_equal(a, b) and np.array_equal(a_offsets, b_offsets):
        return []
    return [
        i
        for i in range(len(a_offsets) - 1)
        if not np.array_equal(a[a_offsets[i] : a_offsets[i + 1]], b[b_offsets[i] : b_offsets[i + 1]])
    ]


class ShownDifference(NamedTuple):
    """The part of a text with the first differing ids, and the ids there."""

    text: str
    expected: tuple[int, ...]
    got: tuple[int, ...]


def describe_difference(
    text: str, expected: "Ids", got: "Ids", backend: Path, add_special_tokens: bool
) -> ShownDifference:
    """Return the first differing ids, and the text at the offsets that Hugging Face reports for them."""
    from tokenizers import Tokenizer

    shortest = min(len(expected), len(got))
    position = next((k for k in range(shortest) if expected[k] != got[k]), shortest)
    low, high = max(0, position - 2), position + 6
    spans = Tokenizer.from_file(str(backend)).encode(text, add_special_tokens=add_special_tokens).offsets
    near = [span for span in spans[low:high] if span[1] > span[0]]
    window = text[near[0][0] : near[-1][1]][:80] if near else text[:80]
    return ShownDifference(ascii(window), tuple(expected[low:high].tolist()), tuple(got[low:high].tolist()))


ACUTE, DOT_BELOW = "\u0301", "\u0323"
"""Accents of two combining classes: the canonical order puts DOT_BELOW first."""

ODD_TEXTS = (
    "",
    " ",
    "\n",
    "a\r\nb\r\n\r\nc\rd\n\n\ne",
    "  two   three    four\tand\t\ttabs \u00a0\u1680\u2002\u2003\u2009\u200b\u2028\u2029\u202f\u205f\u3000 end  ",
    "\ufeffbyte-order mark \ufffe\uffff\ufffd \x00nul\x00\x00 \x1b[0m \x7f\x80\x85",
    "I'm you're he'll they've we'd it's CAN'T 'S 'Re 'LL \u2019s \u2019ll o'clock ''s 's's \u017f'\u017f",
    "0 1 12 123 1234 12345 123456 1234567 0.5 1,000,000 1e-7 \u0661\u0662\u0663\u0664 \u00bd\u2155 \u2168 \u4e00\u4e8c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea\U0001f1eb "
    "\u2764\ufe0f\u200d\U0001f525 1\ufe0f\u20e3 \U0001f3f4\U000e0067\U000e0062\U000e007f \U0001fae8\U0001fac8",
    "\u041f\u0440\u0438\u0432\u0435\u0442\u4f60\u597dworld\u3053\u3093\u306b\u3061\u306f\u0645\u0631\u062d\u0628\u0627"
    "\u0928\u092e\u0938\u094d\u0924\u0947\u05e9\u05dc\u05d5\u05dd\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\uc548\ub155",
    "\u0130stanbul I\u0131i\u0307 \u00df\u1e9e \u03a3\u03c3\u03c2 \u01c5 \u10d0\u1c90",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # \u00e7a\n\tif x != -1e10 and !y || z<<=3; //\\\\n",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\file.txt __init__ snake_case camelCase HTTPServer2",
    "\u2581\u2581a \u2581 \u0120\u010a \u0100\u0143 <0x00> <0xFF> [UNK] <unk> <s> </s> <pad> <mask> ##ing @@",
    "\u202eright to left\u202c \u200eltr\u200f \u2066i\u2069 \u00ad soft\u00adhyphen zero\u200bwidth\u200cnon\u200d",
)
"""Texts on which tokenizers are known to disagree; each text has one kind of content."""

COMBINING_MARKS = (
    "\u0300 \u0301 \u0307 \u0308 \u030a \u0315 \u031b \u0323 \u0327 \u0338 \u0344 \u0345 \u034f \u035c \u0360 \u0483 "
    "\u0488 \u05b0 \u05bc \u05c1 \u064b \u0651 \u0670 \u06dd \u089a \u093c \u093e \u094d \u09be \u0b57 \u0dca \u0e38 "
    "\u0eb8 \u0f71 \u0f74 \u0f7f \u1037 \u1161 \u11a8 \u17d2 \u1dce \u1dfa \u200d \u20d0 \u20dd \u20e3 \u302a \u3099 "
    "\u309a \ua66f \ua806 \ua8c4 \ufb1e \ufe0f \ufe20 \U000101fd \U00010a0d \U00010f4b \U000110ba \U00011930 "
    "\U0001bc9e \U0001d165 \U0001d16d \U0001e8d0 \U0001e94a \U000e0100"
)
"""Marks of each combining class and script in use, spacing and enclosing marks, vowel signs, joiners and selectors."""

NORMAL_FORMS = (
    "\u00e9 e\u0301 \u1e69 s\u0323\u0307 s\u0307\u0323 \u1e61\u0323 \u1e63\u0307 q\u0307\u0323 q\u0323\u0307",
    "\u212b \u00c5 A\u030a \u2126 \u212a \u1fef \u037e \u0387 \u0374 \u2000\u2001 \u2329",  # singletons
    "\u0344 \u0958 \u0929 \u09dc \u0a59 \u0b5c \u0f43 \u2adc \ufb1d \ufb4e \U0001d15e",  # composition exclusions
    "\uac00 \u1100\u1161 \u1100\u1161\u11a8 \uac00\u11a8 \uac01\u11a8 \u1100\uac00 \uac00\u11a7 \ua960\u1161\ud7cb",
    "a\u0301\u0327 a\u0327\u0301 a\u0301\u0301 a\u034f\u0301 a\u0345\u0301 \u0391\u0345\u0301 \u1f80 a\u0308\u0304",
    "\u09c7\u09be \u09c7\u093c\u09be \u0b47\u0b56 \u0cc6\u0cc2\u0cd5 \u1025\u102e \u30ab\u3099 \u304b\u3099",
    "\u0f71\u0f72\u0f74 \u0f73 \u0f75 \u0f81 \u05b0\u05bc\u05e9\u05bc\u05c1 \u1e9b\u0323 \u017f\u0323\u0307",
    "\ufb01 \ufb03 \u210c \u2460 \u24d0 \uff21\uff11 \uff76\uff9e \uff0e \u00b2 \u00bc \u2122 \u2026 \u2025 \u01c4",
    "\ufdfa \u3392 \u32ff \u337b \u33ff \ufe30 \ufe4d \u02b0 \u1d2c \u00a0\u2003\u202f\u3000 \U0001d400 \U0001f100",
    "\uf900 \ufa70 \U0002f800 \u2f00 \u2e9f \u31c0 \u3131 \uffa1 \u1e9a \u0149 \u01f0 \u0675 \u0e33 \u0eb3 \u0f77",
    "a"
    + "\u0323\u0301" * 40
    + " e"
    + "\u0301" * 31
    + "\u0323 o"
    + "\u0301" * 18
    + DOT_BELOW
    + "\u0307" * 18
    + DOT_BELOW,
)
"""Texts that NFC, NFD, NFKC and NFKD decompose, reorder or compose, and some similar texts that they do not change."""

COMPOSED_PAIRS = (
    "\U00011099\U000110ba \U0001109b\U000110ba \U00011131\U00011127 \U00011347\U0001133e \U000114b9\U000114ba "
    "\U000115b8\U000115af \U00011935\U00011930 \U000105d2\u0307 \U000105da\u0307 \U00011382\U000113c9 "
    "\U00011384\U000113bb \U0001138b\U000113c2 \U00011390\U000113c9 \U000113c2\U000113c2 \U000113c2\U000113b8 "
    "\U000113c2\U000113c9 \U0001611e\U0001611e \U0001611e\U00016129 \U0001611e\U0001611f \U0001611e\U00016120 "
    "\U00016129\U0001611f \U00016121\U0001611f \U00016122\U0001611f \U00016121\U00016120 \U00016d67\U00016d67 "
    "\U00016d63\U00016d67 \U00016d69\U00016d67"
)
"""Pairs that Unicode 5.2 to 16 compose; a library with an earlier Unicode version does not compose them."""

LONG_RUN_CHARACTERS = " \0"
"""Characters with a run of 1 MB each, which Hugging Face encodes in a second.

Patterns look ahead in white space, and merges of spaces are long. Few merges contain the NUL byte.
"""


def adversarial_texts(added_tokens: Sequence[str]) -> dict[str, list[str]]:
    """Return adversarial texts by part; some of them contain the tokenizer's added tokens.

    The same tokens give the same texts, so that a verdict can be reproduced. The texts have about 3 MB; the runs of
    LONG_RUN_CHARACTERS have 2 MB of them.
    """
    runs = [c * LONG_RUN_BYTES for c in LONG_RUN_CHARACTERS]
    runs += [c * (MEDIUM_RUN_BYTES // len(c.encode())) for c in "a\n\u4e00"]
    short = ("\t", "1", "-", "=", "_", "\u00a0", "\r\n", " a", "\u00e9", ACUTE, "\u0e01", "\u2581", "\U0001f600")
    runs += [c * (SHORT_RUN_BYTES // len(c.encode())) for c in (*short, "\U0001f468\u200d")]

    # As UTF-8, these characters contain each byte that valid text can have: 00 to BF, and C2 to F4 as lead bytes.
    leads = [(lead - 0xC0) << 6 for lead in range(0xC4, 0xE0)] + [0x800]
    leads += [(lead - 0xE0) << 12 for lead in range(0xE1, 0xF0)] + [0x10000]
    leads += [(lead - 0xF0) << 18 for lead in range(0xF1, 0xF5)]
    letters = [chr(point) for point in (*range(256), *leads) if not 0xD800 <= point < 0xE000] + ["\ud7ff"]
    byte_texts = [text for c in letters for text in (c, f"a{c}a", f" {c} ", c * 3)]
    byte_texts += [f"<0x{byte:02X}>" for byte in range(256)] + ["".join(map(chr, range(0x100, 0x144)))]

    token_texts = [
        text
        for token in added_tokens[:256]
        for text in (token, f"a{token}b {token} {token}{token}\n{token}  x", token[:-1], token[1:], token.upper())
    ]
    token_texts += [" ".join(added_tokens), "".join(added_tokens)]

    marks = COMBINING_MARKS.split()
    rng = random.Random(0)
    alphabet = [*map(chr, range(32, 127)), *"".join((*ODD_TEXTS, *NORMAL_FORMS)), *marks, *added_tokens[:32]]
    alphabet += " \n\t'" * 8
    return {
        "long runs": runs,
        "byte values": byte_texts,
        "special tokens": token_texts,
        "combining marks": [
            text for m in COMBINING_MARKS for text in (m, f"{m}a", f" {m} ", f"a{m}", f"\n{m}{m}1{m}.{m}\u4e00{m}")
        ],
        "normal forms": [*NORMAL_FORMS, *(part for text in NORMAL_FORMS for part in text.split(" "))],
        "odd texts": list(ODD_TEXTS),
        "random characters": ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(1_000)],
    }


CODE_POINT_SPANS = (
    (0x0, 0x3400, 1, 1),
    (0x3400, 0x4DC0, 16, 16),  # CJK
    (0x4DC0, 0x4E00, 1, 1),
    (0x4E00, 0xA000, 16, 16),  # CJK
    (0xA000, 0xAC00, 1, 1),
    (0xAC00, 0xD7A4, 16, 16),  # Hangul
    (0xD7A4, 0xD800, 1, 1),
    (0xE000, 0xF900, 16, 16),  # private use
    (0xF900, 0x12000, 1, 1),
    (0x12000, 0x16000, 4, 1),  # cuneiform, hieroglyphs
    (0x16000, 0x17000, 1, 1),
    (0x17000, 0x1C000, 4, 1),  # Tangut, kana, Nushu
    (0x1C000, 0x20000, 1, 1),
    (0x20000, 0x2A6D0, 64, 64),  # CJK
    (0x2A6D0, 0x34000, 64, 1),  # CJK, where new Unicode versions add characters
    (0x34000, 0x40000, 64, 64),
    (0x40000, 0x110000, 1024, 1024),  # tags, private use, unassigned
)
"""Ranges of code points: first, end, step of the sample, step of the complete list.

The step is above 1 only in large and uniform ranges.
"""


def code_point_probes(normalizes: bool, *, complete: bool = False) -> list[str]:
    """Return a short text (a probe) for each of 60,000 code points.

    Some of the code points are not in Python's Unicode version. A probe contains a space, the code point twice, and
    `'s`, which is one token after a letter and split after punctuation. If the tokenizer `normalizes`, a second probe
    contains the code point between accents, because a combining class reorders them. The second probe also contains the
    decomposition in Hugging Face's Unicode version.
    `complete` includes every code point on which two Unicode versions may differ.
    """
    points = [c for first, end, *steps in CODE_POINT_SPANS for c in range(first, end, steps[complete])]
    probes = [f" {chr(c)}{chr(c)}'s" for c in points]
    if normalizes:
        from tokenizers import normalizers

        marked = list(map(chr, points[0x80:]))
        decomposed = normalizers.NFD().normalize_str("\n".join(marked)).split("\n")
        for c, parts in zip(marked, decomposed, strict=True):
            # `a{c}{ACUTE}` detects a mark that a library treats as a letter, which then separates the accents.
            probes.append(f" a{ACUTE}{c}{DOT_BELOW} a{c}{ACUTE}" + ("" if parts == c else f" {parts}"))
        probes += [f" {pair}" for pair in COMPOSED_PAIRS.split()]
    return probes


def main() -> None:
    """Compare the candidates of the command line with the reference: DIRECTORY NAME..."""
    ignore_stop_signals()
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        answer = compare_with_reference(name, directory)
        (directory / f"answer-{name}.json").write_bytes(msgspec.json.encode(answer))
        if not answer.refused:
            break


if __name__ == "__main__":
    main()
