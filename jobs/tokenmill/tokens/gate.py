"""The parity gate: an encoder is used when it gives Hugging Face's ids on every text tried, never by trust.

`tokens.resolve` writes the texts (hostile ones made here, and the corpus's first documents) and Hugging Face's
ids of them into a directory; candidates then answer in a process of their own (`python -m
tokenmill.tokens.gate DIRECTORY NAME...`), so that a crash or a hang becomes a reason, not the planner's end.
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
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import RequestError, TransientError
from tokenmill.machine import memory_words
from tokenmill.redaction import SECRET_NAME
from tokenmill.tokens import engines
from tokenmill.tokens.encoders import load_encoder, quick_to_load, spell_guard
from tokenmill.tokens.engines.base import EncoderUnavailable, flatten, wrap
from tokenmill.tokens.merges import write_fewer

if TYPE_CHECKING:
    from tokenmill.tokens.engines.base import Encoder, Ids, Offsets

TIMEOUT_SECONDS = 300.0
"""How long a candidate may take: the slowest needs seconds, on a machine with nothing else to do."""

MAX_GUARD = 16_384
"""Most characters an encoder may be guarded from; one that differs on more is rejected. A library of a later
Unicode version than Hugging Face's differs on what that version added: 4,657 for gigatoken and Llama 3."""

RUN_BYTES, MIDDLE_RUN_BYTES, SHORT_RUN_BYTES = 1_000_000, 100_000, 20_000
CHUNK = 64
"""Probes joined to one text: an encoder must answer for 60,000 of them."""
SLICE_CHARACTERS = 1_000_000
"""Hugging Face's answers take 100 bytes a token or more until they are laid on end."""

LATE = "did not answer within"
PROGRESS_SECONDS = 20.0
"""Interval of the lines that say what a planner still waits for."""

FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals that a process gets from its system or an operator, whatever it does: no sign of a fault of its own."""

OUT_OF_MEMORY = re.compile(r"memory allocation of \d+ bytes failed|MemoryError|bad_alloc|Cannot allocate memory")
"""What Rust, Python and C++ write to standard error before they end for lack of memory."""

UNUSABLE = "cannot be used"
"""How the reason begins for which an encoder refuses a tokenizer."""


@dataclass(frozen=True)
class Rejection:
    """Why an encoder was not taken; the rest is empty where it did not answer at all.

    `part` is the part of the texts that the differing one is from.
    """

    encoder: str
    version: str
    reason: str
    text: str = ""
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    part: str = ""

    def __str__(self) -> str:
        said = f"{self.encoder} {self.version} {self.reason}"
        if self.text:
            said += f" on {self.text} ({self.part}; expected {list(self.expected)}, got {list(self.got)})"
        return said

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Rejection":
        """Rebuild what was written as JSON, by this version or another."""
        ids = {name: tuple(value.get(name, ())) for name in ("expected", "got")}
        return cls(**_known(cls, value | ids))


@dataclass(frozen=True)
class Verdict:
    """Which encoder is taken, after how many texts; `guard` is for load_encoder: what to leave to Hugging Face."""

    encoder: str
    version: str
    checked: int
    guard: str = ""
    rejected: tuple[Rejection, ...] = ()

    @property
    def lasts(self) -> bool:
        """Whether another look would find the same: no encoder crashed, hung or was killed."""
        return all(rejection.text or rejection.reason.startswith(UNUSABLE) for rejection in self.rejected)

    def to_json(self) -> dict[str, Any]:
        """Return what from_json takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Verdict":
        """Rebuild what was written as JSON, by this version or another."""
        rejected = tuple(map(Rejection.from_json, value.get("rejected", ())))
        return cls(**_known(cls, value | {"rejected": rejected}))


def _known(kind: type[Verdict] | type[Rejection], value: dict[str, Any]) -> dict[str, Any]:
    return {field.name: value[field.name] for field in fields(kind) if field.name in value}


def fallback_warning(verdict: Verdict) -> str | None:
    """Word the warning that a faster encoder was not taken, None when the first one was."""
    if not verdict.rejected:
        return None
    why = "; ".join(map(str, verdict.rejected))
    return f"encoding with {verdict.encoder} {verdict.version}: {why}. The output is the same, only the speed differs."


def judge(
    directory: Path,
    encoder: str = engines.AUTO,
    *,
    timeout: float = TIMEOUT_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Try candidates on what `prepare` wrote into a directory; return the first that always agrees.

    `encoder` other than "auto" is tried alone. Raises RequestError when none agrees, TransientError when the process
    was killed: that says nothing about the encoder.
    """
    names = _read(directory / "question.json")["order"] if encoder == engines.AUTO else [encoder]
    rejected: list[Rejection] = []
    while names:
        ended, killed = _answers(directory, names, timeout, say)
        for name in names[:]:
            if killed and not (directory / f"answer-{name}.json").exists():
                raise TransientError(killed_words(f"judging the encoder {name}", ended))
            names.remove(name)
            answer = _read_answer(directory, name, ended)
            if "rejected" not in answer:
                return Verdict(name, answer["version"], answer["checked"], answer["guard"], tuple(rejected))
            rejected.append(Rejection.from_json({"encoder": name, "version": answer["version"]} | answer["rejected"]))
            if not answer.get("refused"):  # where the process ended
                break
    why = "; ".join(map(str, rejected))
    if encoder == engines.AUTO:
        raise RequestError(
            f"no encoder agrees with this tokenizer's own ids: {why}; use another tokenizer, or report it"
        )
    raise RequestError(f"--encoder {encoder} cannot be used with this tokenizer: {why}; leave it to --encoder auto")


def _answers(directory: Path, names: list[str], timeout: float, say: Callable[[str], None]) -> tuple[str, bool]:
    """Have candidates answer in a process, one after another until one could be loaded.

    Returns how the process ended, in words, and whether it was killed from outside.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenmill.tokens.gate", str(directory), *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        try:
            ended = wait_for(process, timeout, lambda seconds: say(f"still judging encoders after {seconds:.0f} s"))
        finally:
            process.kill()
    if ended is None:
        return f"{LATE} {timeout:g} s", False
    return how_it_ended(process.returncode, ended), was_killed(process.returncode, ended)


def wait_for(process: "subprocess.Popen[bytes]", timeout: float, still: Callable[[float], None]) -> str | None:
    """Wait for a child; return its standard error, None when it takes too long. `still` reports every interval."""
    start = time.monotonic()
    while True:
        try:
            _, output = process.communicate(timeout=min(PROGRESS_SECONDS, max(0.0, start + timeout - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= start + timeout:
                return None
            still(time.monotonic() - start)
        else:
            return (output or b"").decode(errors="replace")


def was_killed(returncode: int, output: str) -> bool:
    """Tell whether a child was killed from outside or ended for lack of memory: another attempt may succeed."""
    return (
        -returncode in FROM_OUTSIDE
        or _interrupted(output)
        or (returncode != 0 and OUT_OF_MEMORY.search(output) is not None)
    )


def how_it_ended(returncode: int, output: str) -> str:
    """Word how a child ended that did not succeed."""
    if returncode and (lack := OUT_OF_MEMORY.search(output)):
        return f"ran out of memory ({lack.group()})"
    if _interrupted(output):
        return "was killed (SIGINT)"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in signal.valid_signals() else f"signal {-returncode}"
        return f"was killed ({name})" if -returncode in FROM_OUTSIDE else f"crashed ({name})"
    last = output.strip().splitlines()[-1:] or [f"exit code {returncode}"]
    return f"failed: {last[0][:300]}"


def _interrupted(output: str) -> bool:
    """Tell whether SIGINT came before the child ignored it."""
    return output.rstrip().endswith("KeyboardInterrupt")


def killed_words(doing: str, ended: str) -> str:
    """Word the error about a child that was killed."""
    return (
        f"the process {doing} {ended} ({memory_words()}): a signal from outside, or too little memory; if it happens "
        "again, raise the memory limit (in a chart: --set resources.limits.memory=4Gi)"
    )


def _read_answer(directory: Path, name: str, ended: str) -> dict[str, Any]:
    try:
        return _read(directory / f"answer-{name}.json")
    except (OSError, ValueError):
        return {"version": encoder_version(name), "rejected": {"reason": ended}}


def ignore_stops() -> None:
    """Leave SIGTERM and Ctrl-C to the parent: it gets them too, and ends its children."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def encoder_version(name: str) -> str:
    """Return the installed version of an encoder's package, "none" without it."""
    return engines.package_version(engines.get(name).package)


def is_installed(encoder: str, version: str) -> bool:
    """Tell whether an encoder's package is installed in that version.

    What pip writes beside the package says so at once; importlib.metadata takes as long to import as all that
    a worker does with its plan.
    """
    if encoder not in engines.ENGINES:  # of another version of tokenmill
        return False
    found = importlib.util.find_spec(engines.get(encoder).package)
    if found is not None and found.origin is not None:
        package = Path(found.origin).parent
        if package.with_name(f"{package.name}-{version}.dist-info").is_dir():
            return True
    return encoder_version(encoder) == version


def environment() -> dict[str, str]:
    """Return the environment for a child that handles a tokenizer: no secrets, no network, no chatter."""
    kept = {key: value for key, value in os.environ.items() if not SECRET_NAME.search(key)}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "USE_TORCH": "0",
        "USE_TF": "0",
        "USE_FLAX": "0",
    }


def prepare(
    directory: Path,
    backend: str,
    parts: dict[str, list[str]],
    add_special_tokens: bool,
    encode: Callable[..., Any],
    *,
    end: int | None = None,
    encoder: str = engines.AUTO,
) -> None:
    """Write the backend as workers load it, what candidates are asked, and the ids that `encode` gives.

    `encode` takes texts and returns Hugging Face encodings; candidates are to put `end` behind each text's. To the
    parts comes a sample of all code points.
    """
    import numpy as np
    import orjson

    order, normalizes = _write_backend(directory, backend)
    chunks = _joined(code_point_probes(normalizes))
    question = {
        "order": order if encoder == engines.AUTO else [encoder],
        "parts": parts,
        "chunks": chunks,
        "normalizes": normalizes,
        "add_special_tokens": add_special_tokens,
        "end": end,
    }
    (directory / "question.json").write_bytes(orjson.dumps(question))

    texts = [*_texts(parts), *map("".join, chunks)]
    ends = list(accumulate(map(len, texts)))
    answers, first = [], 0
    for i in range(1, len(texts) + 1):
        if i == len(texts) or ends[i] - (ends[first - 1] if first else 0) > SLICE_CHARACTERS:
            answers.append(flatten(encode(texts[first:i])))
            first = i
    lengths = [np.diff(offsets) for _, offsets in answers]
    ids, offsets = np.concatenate([ids for ids, _ in answers]), np.cumsum(np.concatenate([[0], *lengths]))
    np.savez(directory / "reference.npz", ids=ids, offsets=offsets.astype(np.int64))


def _write_backend(directory: Path, backend: str) -> tuple[tuple[str, ...], bool]:
    """Write the backend as workers load it; return the encoders in order, and whether it has a normalizer."""
    import orjson

    known = orjson.loads(backend)
    (directory / "backend.json").write_bytes(orjson.dumps(quick_to_load(known)))
    normalizer = known["normalizer"] or {}
    return engines.by_speed(known["pre_tokenizer"]), bool(normalizer) and normalizer.get("normalizers") != []


def answer(name: str, directory: Path) -> dict[str, Any]:
    """Compare an encoder with the reference in a directory; return what `judge` reads."""
    import numpy as np

    question = _read(directory / "question.json")
    end = question["end"]
    plain, chunks, add = _texts(question["parts"]), question["chunks"], question["add_special_tokens"]
    texts = [*plain, *map("".join, chunks)]
    backend = directory / "backend.json"
    found: dict[str, Any] = {"version": encoder_version(name), "checked": len(texts), "guard": ""}
    if name != engines.REFERENCE:
        write_fewer(backend)
    try:
        encoder = load_encoder(name, backend, add, end=end)
    except EncoderUnavailable as error:
        return found | {"refused": True, "rejected": {"reason": f"{UNUSABLE}: {error}"}}

    mine, unsteady = _twice(encoder, texts)
    with np.load(directory / "reference.npz") as reference:
        exact = wrap(reference["ids"], reference["offsets"], [], [] if end is None else [end])
    wrong = _differing(mine, exact)
    if name != engines.REFERENCE and any(i >= len(plain) for i in wrong):
        hf = load_encoder(engines.REFERENCE, backend, add, end=end)
        guard = _guard(encoder, hf, question["normalizes"])
        if 0 < len(guard) <= MAX_GUARD:
            found["guard"] = spell_guard(guard)
            encoder = load_encoder(name, backend, add, found["guard"], end=end)
            # Chunks lose their guarded probes: else Hugging Face would answer for the other ones, too.
            cut = [i - len(plain) for i in wrong if i >= len(plain)]
            left = ["".join(p for p in chunks[i] if not guard.intersection(p)) for i in cut]
            more, more_offsets = hf.encode(left)
            ids, offsets = exact
            behind = offsets[len(plain)]
            texts = [*plain, *left]
            exact = np.concatenate([ids[:behind], more]), np.concatenate([offsets[: len(plain)], more_offsets + behind])
            mine, unsteady = _twice(encoder, texts)
            wrong = _differing(mine, exact)
    if not wrong and not unsteady:
        return found
    first = (wrong or unsteady)[0]
    expected = exact[0][exact[1][first] : exact[1][first + 1]]
    got, _ = encoder.encode([texts[first]])
    parts = zip(question["parts"], accumulate(map(len, question["parts"].values())), strict=True)
    part = next((part for part, behind in parts if first < behind), "code points")
    reason = "differs from Hugging Face" if wrong else "gives other ids when asked again"
    return found | {
        "rejected": {"reason": reason, "part": part} | difference(texts[first], expected, got, backend, add)
    }


def _texts(parts: dict[str, list[str]]) -> list[str]:
    return [text for texts in parts.values() for text in texts]


def _joined(probes: Sequence[str]) -> list[Sequence[str]]:
    return [probes[i : i + CHUNK] for i in range(0, len(probes), CHUNK)]


def _twice(encoder: "Encoder", texts: list[str]) -> tuple[tuple["Ids", "Offsets"], list[int]]:
    """Encode texts; list those that come out otherwise in small batches and with warm caches, long ones aside."""
    import numpy as np

    mine = ids, offsets = encoder.encode(texts)
    unsteady = []
    short = (
        [i for i, text in enumerate(texts) if len(text) < SHORT_RUN_BYTES] if encoder.name != engines.REFERENCE else []
    )
    for first in range(0, len(short), CHUNK):
        chosen = short[first : first + CHUNK]
        again, starts = encoder.encode([texts[i] for i in chosen])
        unsteady += [
            i
            for i, low, high in zip(chosen, starts[:-1], starts[1:], strict=True)
            if not np.array_equal(again[low:high], ids[offsets[i] : offsets[i + 1]])
        ]
    return mine, unsteady


def _guard(encoder: "Encoder", exact: "Encoder", normalizes: bool) -> set[str]:
    """Find the characters on which an encoder differs from the exact one, among all that are assigned."""
    chunks = _joined(code_point_probes(normalizes, whole=True))
    texts = ["".join(chunk) for chunk in chunks]
    suspects = [probe for i in _differing(encoder.encode(texts), exact.encode(texts)) for probe in chunks[i]]
    apart = _differing(encoder.encode(suspects), exact.encode(suspects))
    return {c for i in apart for c in suspects[i] if not c.isascii() and c not in (ABOVE, BELOW)}


def _differing(mine: tuple["Ids", "Offsets"], exact: tuple["Ids", "Offsets"]) -> list[int]:
    """List the texts of which two encoders' ids differ."""
    import numpy as np

    (a, starts), (b, others) = mine, exact
    if np.array_equal(a, b) and np.array_equal(starts, others):
        return []
    return [
        i
        for i in range(len(starts) - 1)
        if not np.array_equal(a[starts[i] : starts[i + 1]], b[others[i] : others[i + 1]])
    ]


def difference(text: str, expected: "Ids", got: "Ids", backend: Path, add_special_tokens: bool) -> dict[str, Any]:
    """Describe the first place where ids differ, with the text there as Hugging Face locates it."""
    from tokenizers import Tokenizer

    shortest = min(len(expected), len(got))
    at = next((k for k in range(shortest) if expected[k] != got[k]), shortest)
    low, high = max(0, at - 2), at + 6
    spans = Tokenizer.from_file(str(backend)).encode(text, add_special_tokens=add_special_tokens).offsets
    near = [span for span in spans[low:high] if span[1] > span[0]]
    window = text[near[0][0] : near[-1][1]][:80] if near else text[:80]
    return {"text": ascii(window), "expected": expected[low:high].tolist(), "got": got[low:high].tolist()}


def _read(path: Path) -> dict[str, Any]:
    import orjson

    value: dict[str, Any] = orjson.loads(path.read_bytes())
    return value


ABOVE, BELOW = "\u0301", "\u0323"
"""Accents of two combining classes: canonical order puts the one below first."""

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
"""Texts on which tokenizers are known to disagree, by what they are made of."""

MARKS = (
    "\u0300 \u0301 \u0307 \u0308 \u030a \u0315 \u031b \u0323 \u0327 \u0338 \u0344 \u0345 \u034f \u035c \u0360 \u0483 "
    "\u0488 \u05b0 \u05bc \u05c1 \u064b \u0651 \u0670 \u06dd \u089a \u093c \u093e \u094d \u09be \u0b57 \u0dca \u0e38 "
    "\u0eb8 \u0f71 \u0f74 \u0f7f \u1037 \u1161 \u11a8 \u17d2 \u1dce \u1dfa \u200d \u20d0 \u20dd \u20e3 \u302a \u3099 "
    "\u309a \ua66f \ua806 \ua8c4 \ufb1e \ufe0f \ufe20 \U000101fd \U00010a0d \U00010f4b \U000110ba \U00011930 "
    "\U0001bc9e \U0001d165 \U0001d16d \U0001e8d0 \U0001e94a \U000e0100"
)
"""Marks of each combining class and script in use, spacing and enclosing ones, vowel signs, joiners, selectors."""

NORMAL_FORMS = (
    "\u00e9 e\u0301 \u1e69 s\u0323\u0307 s\u0307\u0323 \u1e61\u0323 \u1e63\u0307 q\u0307\u0323 q\u0323\u0307",
    "\u212b \u00c5 A\u030a \u2126 \u212a \u1fef \u037e \u0387 \u0374 \u2000\u2001 \u2329",  # singletons
    "\u0344 \u0958 \u0929 \u09dc \u0a59 \u0b5c \u0f43 \u2adc \ufb1d \ufb4e \U0001d15e",  # never composed again
    "\uac00 \u1100\u1161 \u1100\u1161\u11a8 \uac00\u11a8 \uac01\u11a8 \u1100\uac00 \uac00\u11a7 \ua960\u1161\ud7cb",
    "a\u0301\u0327 a\u0327\u0301 a\u0301\u0301 a\u034f\u0301 a\u0345\u0301 \u0391\u0345\u0301 \u1f80 a\u0308\u0304",
    "\u09c7\u09be \u09c7\u093c\u09be \u0b47\u0b56 \u0cc6\u0cc2\u0cd5 \u1025\u102e \u30ab\u3099 \u304b\u3099",
    "\u0f71\u0f72\u0f74 \u0f73 \u0f75 \u0f81 \u05b0\u05bc\u05e9\u05bc\u05c1 \u1e9b\u0323 \u017f\u0323\u0307",
    "\ufb01 \ufb03 \u210c \u2460 \u24d0 \uff21\uff11 \uff76\uff9e \uff0e \u00b2 \u00bc \u2122 \u2026 \u2025 \u01c4",
    "\ufdfa \u3392 \u32ff \u337b \u33ff \ufe30 \ufe4d \u02b0 \u1d2c \u00a0\u2003\u202f\u3000 \U0001d400 \U0001f100",
    "\uf900 \ufa70 \U0002f800 \u2f00 \u2e9f \u31c0 \u3131 \uffa1 \u1e9a \u0149 \u01f0 \u0675 \u0e33 \u0eb3 \u0f77",
    "a" + "\u0323\u0301" * 40 + " e" + "\u0301" * 31 + "\u0323 o" + "\u0301" * 18 + BELOW + "\u0307" * 18 + BELOW,
)
"""Texts that NFC, NFD, NFKC and NFKD take apart, reorder or join, beside some that only look so."""

COMPOSITIONS = (
    "\U00011099\U000110ba \U0001109b\U000110ba \U00011131\U00011127 \U00011347\U0001133e \U000114b9\U000114ba "
    "\U000115b8\U000115af \U00011935\U00011930 \U000105d2\u0307 \U000105da\u0307 \U00011382\U000113c9 "
    "\U00011384\U000113bb \U0001138b\U000113c2 \U00011390\U000113c9 \U000113c2\U000113c2 \U000113c2\U000113b8 "
    "\U000113c2\U000113c9 \U0001611e\U0001611e \U0001611e\U00016129 \U0001611e\U0001611f \U0001611e\U00016120 "
    "\U00016129\U0001611f \U00016121\U0001611f \U00016122\U0001611f \U00016121\U00016120 \U00016d67\U00016d67 "
    "\U00016d63\U00016d67 \U00016d69\U00016d67"
)
"""Pairs that Unicode 5.2 to 16 began to compose; a library of an earlier version leaves them apart."""

LONG_RUNS = " \0"
"""What gets 1 MB, of which Hugging Face takes a second: white space, which patterns look ahead in and merges grow
long of, and a byte that few merges know."""


def hostile_texts(added_tokens: Sequence[str]) -> dict[str, list[str]]:
    """List hostile texts by part, with the tokenizer's added tokens spelled out in them.

    The same for the same tokens, so that a verdict can be had again; about 3 MB, of which LONG_RUNS are 2.
    """
    runs = [c * RUN_BYTES for c in LONG_RUNS]
    runs += [c * (MIDDLE_RUN_BYTES // len(c.encode())) for c in "a\n\u4e00"]
    short = ("\t", "1", "-", "=", "_", "\u00a0", "\r\n", " a", "\u00e9", ABOVE, "\u0e01", "\u2581", "\U0001f600")
    runs += [c * (SHORT_RUN_BYTES // len(c.encode())) for c in (*short, "\U0001f468\u200d")]

    # As UTF-8 these hold each byte that text can: 00 to BF, and C2 to F4, which begin a character.
    leads = [(lead - 0xC0) << 6 for lead in range(0xC4, 0xE0)] + [0x800]
    leads += [(lead - 0xE0) << 12 for lead in range(0xE1, 0xF0)] + [0x10000]
    leads += [(lead - 0xF0) << 18 for lead in range(0xF1, 0xF5)]
    letters = [chr(point) for point in (*range(256), *leads) if not 0xD800 <= point < 0xE000] + ["\ud7ff"]
    held = [text for c in letters for text in (c, f"a{c}a", f" {c} ", c * 3)]
    held += [f"<0x{byte:02X}>" for byte in range(256)] + ["".join(map(chr, range(0x100, 0x144)))]

    tokens = [
        text
        for token in added_tokens[:256]
        for text in (token, f"a{token}b {token} {token}{token}\n{token}  x", token[:-1], token[1:], token.upper())
    ]
    tokens += [" ".join(added_tokens), "".join(added_tokens)]

    marks = MARKS.split()
    dice = random.Random(0)
    alphabet = [*map(chr, range(32, 127)), *"".join((*ODD_TEXTS, *NORMAL_FORMS)), *marks, *added_tokens[:32]]
    alphabet += " \n\t'" * 8
    return {
        "long runs": runs,
        "byte values": held,
        "special tokens": tokens,
        "combining marks": [
            text for m in MARKS for text in (m, f"{m}a", f" {m} ", f"a{m}", f"\n{m}{m}1{m}.{m}\u4e00{m}")
        ],
        "normal forms": [*NORMAL_FORMS, *(part for text in NORMAL_FORMS for part in text.split(" "))],
        "odd texts": list(ODD_TEXTS),
        "random characters": ["".join(dice.choices(alphabet, k=dice.randint(1, 60))) for _ in range(1_000)],
    }


SPANS = (
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
    (0x2A6D0, 0x34000, 64, 1),  # CJK that Unicode versions add to
    (0x34000, 0x40000, 64, 64),
    (0x40000, 0x110000, 1024, 1024),  # tags, private use, unassigned
)
"""Code points by first, end, step, and step of the whole list: samples only of what is large and uniform."""


def code_point_probes(normalizes: bool, *, whole: bool = False) -> list[str]:
    """List a short text for each of 60,000 code points, whether Python's Unicode version knows it or not.

    In a probe the code point follows a space and itself and comes before `'s`, a token of its own after a
    letter and split after punctuation; where the tokenizer `normalizes`, it also stands between accents
    (a combining class reorders them) and comes decomposed, as far as Hugging Face's Unicode version says.
    `whole` takes every code point on which two Unicode versions may differ.
    """
    points = [c for first, end, *steps in SPANS for c in range(first, end, steps[whole])]
    probes = [f" {chr(c)}{chr(c)}'s" for c in points]
    if normalizes:
        from tokenizers import normalizers

        marked = list(map(chr, points[0x80:]))
        decomposed = normalizers.NFD().normalize_str("\n".join(marked)).split("\n")
        for c, parts in zip(marked, decomposed, strict=True):
            # The second shows a mark that one library takes for a letter, and so as one that keeps accents apart.
            probes.append(f" a{ABOVE}{c}{BELOW} a{c}{ABOVE}" + ("" if parts == c else f" {parts}"))
        probes += [f" {pair}" for pair in COMPOSITIONS.split()]
    return probes


def main() -> None:
    """Answer for candidates: DIRECTORY NAME..."""
    import orjson

    ignore_stops()
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        found = answer(name, directory)
        (directory / f"answer-{name}.json").write_bytes(orjson.dumps(found))
        if not found.get("refused"):
            break


if __name__ == "__main__":
    main()
