"""The parity gate: an encoder is used when it gives Hugging Face's ids on every text tried, never by trust.

`tokens.resolve` writes the texts (hostile ones made here, and the corpus's first documents) and Hugging Face's
ids of them into a directory; each candidate then answers in a process of its own (`python -m
tokenmill.tokens.gate NAME DIRECTORY`), so that a crash or a hang becomes a reason, not the planner's end.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenmill.tokens.encoders import Encoder, Ids, Offsets

CANDIDATES = ("fastokens", "gigatoken", "hf")
"""In the order they are tried."""

TIMEOUT_SECONDS = 300.0
"""How long a candidate may take: the slowest needs seconds, on a machine with nothing else to do."""

MAX_GUARD = 16_384
"""Most characters an encoder may be guarded from; one that differs on more is rejected. A library of a later
Unicode version than Hugging Face's differs on what that version added: 4,657 for gigatoken and Llama 3."""

RUN_LENGTH = 100_000
CHUNK = 64
"""Probes joined to one text: an encoder must answer for 60,000 of them."""


@dataclass(frozen=True)
class Rejection:
    """Why an encoder was not taken; text, expected and got are empty where it did not answer at all."""

    encoder: str
    version: str
    reason: str
    text: str = ""
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()

    def __str__(self) -> str:
        said = f"{self.encoder} {self.version} {self.reason}"
        if self.text:
            said += f" on {self.text} (expected {list(self.expected)}, got {list(self.got)})"
        return said


@dataclass(frozen=True)
class Verdict:
    """Which encoder is taken, after how many texts; `guard` is for load_encoder: what to leave to Hugging Face."""

    encoder: str
    version: str
    checked: int
    guard: str = ""
    rejected: tuple[Rejection, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what from_json takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Verdict":
        """Rebuild a verdict that was written as JSON."""
        rejected = (
            Rejection(**{**item, "expected": tuple(item["expected"]), "got": tuple(item["got"])})
            for item in value["rejected"]
        )
        return cls(**{**value, "rejected": tuple(rejected)})


def fallback_warning(verdict: Verdict) -> str | None:
    """Word the warning that a faster encoder was not taken, None when the first one was."""
    if not verdict.rejected:
        return None
    why = "; ".join(map(str, verdict.rejected))
    return f"encoding with {verdict.encoder} {verdict.version}: {why}. The output is the same, only the speed differs."


def judge(directory: Path, encoder: str = "auto", *, timeout: float = TIMEOUT_SECONDS) -> Verdict:
    """Try candidates on what `prepare` wrote into a directory; return the first that always agrees.

    `encoder` other than "auto" is tried alone. Raises RequestError when none agrees.
    """
    rejected: list[Rejection] = []
    for name in CANDIDATES if encoder == "auto" else (encoder,):
        answer = _ask(name, directory, timeout)
        if "rejected" not in answer:
            return Verdict(name, answer["version"], answer["checked"], answer["guard"], tuple(rejected))
        found = answer["rejected"]
        rejected.append(
            Rejection(
                name, answer["version"], **{**found, "expected": tuple(found["expected"]), "got": tuple(found["got"])}
            )
        )
    why = "; ".join(map(str, rejected))
    if encoder == "auto":
        raise RequestError(
            f"no encoder agrees with this tokenizer's own ids: {why}; use another tokenizer, or report it"
        )
    raise RequestError(f"--encoder {encoder} cannot be used with this tokenizer: {why}; leave it to --encoder auto")


def _ask(name: str, directory: Path, timeout: float) -> dict[str, Any]:
    """Have a candidate answer in its own process; what goes wrong there becomes a rejection."""
    from tokenmill.tokens.encoders import encoder_version

    answer = directory / f"answer-{name}.json"
    command = [sys.executable, "-P", "-m", "tokenmill.tokens.gate", name, str(directory)]
    reason = ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False, env=environment()
        )
        if done.returncode == 0:
            result: dict[str, Any] = json.loads(answer.read_bytes())
            return result
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        reason = f"failed: {last[0][:300]}"
        if done.returncode < 0:
            reason = f"crashed ({signal.Signals(-done.returncode).name})"
    except subprocess.TimeoutExpired:
        reason = f"did not answer within {timeout:g} s"
    lost = {"reason": reason, "text": "", "expected": [], "got": []}
    return {"version": encoder_version(name), "rejected": lost}


def environment() -> dict[str, str]:
    """Return the environment for a child that handles a tokenizer: no secrets, no network, no chatter."""
    secrets = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")
    kept = {key: value for key, value in os.environ.items() if key not in secrets}
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
    directory: Path, texts: Sequence[str], normalizes: bool, add_special_tokens: bool, encode: Callable[..., Any]
) -> None:
    """Write what candidates are asked, and the ids that `encode` (texts -> Hugging Face encodings) gives.

    To the texts comes a sample of all code points; `normalizes` says whether the tokenizer has a normalizer,
    which makes more of them matter.
    """
    import numpy as np

    from tokenmill.tokens.encoders import flatten

    chunks = _joined(code_point_probes(normalizes))
    ids, offsets = flatten(encode([*texts, *map("".join, chunks)]))
    np.savez(directory / "reference.npz", ids=ids, offsets=offsets)
    question = {
        "texts": texts,
        "chunks": chunks,
        "normalizes": normalizes,
        "add_special_tokens": add_special_tokens,
    }
    (directory / "question.json").write_text(json.dumps(question))


def answer(name: str, directory: Path) -> dict[str, Any]:
    """Compare an encoder with the reference in a directory; return what `judge` reads."""
    import numpy as np

    from tokenmill.tokens.encoders import EncoderUnavailable, encoder_version, load_encoder, spell_guard

    question = json.loads((directory / "question.json").read_bytes())
    with np.load(directory / "reference.npz") as reference:
        ids, offsets = reference["ids"], reference["offsets"]
    plain, chunks, add = question["texts"], question["chunks"], question["add_special_tokens"]
    texts = [*plain, *map("".join, chunks)]
    backend = directory / "backend.json"
    found: dict[str, Any] = {"version": encoder_version(name), "checked": len(texts), "guard": ""}
    try:
        encoder = load_encoder(name, backend, add)
    except EncoderUnavailable as error:
        return found | {"rejected": {"reason": f"cannot be used: {error}", "text": "", "expected": [], "got": []}}

    wrong = _differing(encoder, texts, ids, offsets)
    if any(i >= len(plain) for i in wrong):
        exact = load_encoder("hf", backend, add)
        guard = _guard(encoder, exact, question["normalizes"])
        if 0 < len(guard) <= MAX_GUARD:
            found["guard"] = spell_guard(guard)
            encoder = load_encoder(name, backend, add, found["guard"])
            # Chunks lose their guarded probes: else Hugging Face would answer for the other ones, too.
            cut = [i - len(plain) for i in wrong if i >= len(plain)]
            left = ["".join(p for p in chunks[i] if not guard.intersection(p)) for i in cut]
            more, more_offsets = exact.encode(left)
            end = offsets[len(plain)]
            texts = [*plain, *left]
            ids = np.concatenate([ids[:end], more])
            offsets = np.concatenate([offsets[: len(plain)], more_offsets + end])
            wrong = _differing(encoder, texts, ids, offsets)
    if not wrong and name != "hf":  # once more, in small batches and with warm caches
        for i in range(0, len(texts), CHUNK):
            again = offsets[i : i + CHUNK + 1]
            batch = texts[i : i + CHUNK], ids[again[0] : again[-1]], again - again[0]
            wrong += [i + j for j in _differing(encoder, *batch)]
    if not wrong:
        return found
    first = wrong[0]
    expected = ids[offsets[first] : offsets[first + 1]]
    got, _ = encoder.encode([texts[first]])
    return found | {"rejected": difference(texts[first], expected, got, backend, add)}


def _joined(probes: Sequence[str]) -> list[Sequence[str]]:
    return [probes[i : i + CHUNK] for i in range(0, len(probes), CHUNK)]


def _guard(encoder: "Encoder", exact: "Encoder", normalizes: bool) -> set[str]:
    """Find the characters on which an encoder differs from the exact one, among all that are assigned."""
    chunks = _joined(code_point_probes(normalizes, whole=True))
    texts = ["".join(chunk) for chunk in chunks]
    suspects = [probe for i in _differing(encoder, texts, *exact.encode(texts)) for probe in chunks[i]]
    apart = _differing(encoder, suspects, *exact.encode(suspects))
    return {c for i in apart for c in suspects[i] if not c.isascii() and c not in (ABOVE, BELOW)}


def _differing(encoder: "Encoder", texts: list[str], ids: "Ids", offsets: "Offsets") -> list[int]:
    """List the texts that an encoder encodes to other ids than the given ones."""
    import numpy as np

    mine, mine_offsets = encoder.encode(texts)
    if np.array_equal(mine, ids) and np.array_equal(mine_offsets, offsets):
        return []
    return [
        i
        for i in range(len(texts))
        if not np.array_equal(
            mine[mine_offsets[i] : mine_offsets[i + 1]],
            ids[offsets[i] : offsets[i + 1]],
        )
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
    return {
        "reason": "differs from Hugging Face",
        "text": ascii(window),
        "expected": expected[low:high].tolist(),
        "got": got[low:high].tolist(),
    }


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
    "\u0301\u0301 a\u0301 \u0301a e\u0323\u0301 e\u0301\u0323 \u00e9 e\u0301 \u1e69 s\u0323\u0307 s\u0307\u0323",
    "\ufb01 \u212b \u2126 \u210c \u2460 \uff21\uff11 \uff76\uff9e \u00b2 \u2122 \u01c4 \u1e9b\u0323 \ufdfa \u3392",
    "\uac00 \u1100\u1161 \u1100\u1161\u11a8 \uac01 \u0344 \u0374 \u037e \u0958 \u2adc \ufb1d \U0001d15e \U0002f800",
    "q\u0307\u0323 \u0f71\u0f72\u0f74 \u05b0\u05bc\u05e9\u05bc\u05c1",
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


def adversarial_texts(added_tokens: Sequence[str]) -> list[str]:
    """List hostile texts, with the tokenizer's added tokens spelled out in them.

    The same for the same tokens, so that a verdict can be had again; about 1 MB.
    """
    texts = list(ODD_TEXTS)
    texts += [chr(c) for c in range(256)]
    texts += [f"{a}{chr(c)}{a}" for c in range(256) for a in ("a", " ")]
    texts += [c * RUN_LENGTH for c in " \0a\n"]
    texts += [
        c * (RUN_LENGTH // 5) for c in ("\t", "1", "-", "\r\n", " a", "\u00e9", ABOVE, "\u4e00", "\U0001f468\u200d")
    ]
    for token in added_tokens[:256]:
        texts += [token, f"a{token}b {token} {token}{token}\n{token}  x", token[:-1], token.upper()]
    texts += [" ".join(added_tokens[:4096]), "".join(added_tokens[:4096])]
    dice = random.Random(0)
    alphabet = [*map(chr, range(32, 127)), *"".join(ODD_TEXTS), *added_tokens[:32], *" \n\t'" * 8]
    texts += ["".join(dice.choices(alphabet, k=dice.randint(1, 60))) for _ in range(1_000)]
    return texts


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
            probes.append(f" a{ABOVE}{c}{BELOW}" if parts == c else f" a{ABOVE}{c}{BELOW} {parts}")
    return probes


def main() -> None:
    """Answer for one candidate: NAME DIRECTORY."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    (directory / f"answer-{name}.json").write_text(json.dumps(answer(name, directory)))


if __name__ == "__main__":
    main()
