"""The child process that loads a tokenizer: `python -m tokenmill.tokens.resolve DIRECTORY`.

Reads DIRECTORY/request.json and DIRECTORY/tokenizer/, loads them offline with transformers as Megatron-LM
does, and writes backend.json, what the gate asks of the encoders, and outcome.json: {"settled": fields of
ResolvedTokenizer} or {"error": message}. What it prints tells the gate's process how far that is. The files
are hostile: no code of theirs runs, and what they do to the libraries ends with this process.
"""

import difflib
import gc
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError
from tokenmill.tokens.gate import hostile_texts, prepare
from tokenmill.tokens.tokenizer import CHAT_TOKENS

EOD_TOKENS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|END_OF_TEXT|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOD]",
    "<eod>",
)
"""What tokenizers call the end of a document; the ones in a vocabulary are named in messages."""


def settle(work: Path, say: Callable[[bytes], None] = lambda word: None) -> dict[str, Any]:
    """Load the tokenizer, write backend.json and the gate's question and answer; return the settled fields."""
    request = json.loads((work / "request.json").read_bytes())
    name, add = request["reference"], request["add_special_tokens"]
    _check_json(work / "tokenizer", name)
    tokenizer, backend = _load(work / "tokenizer", name)
    text = backend.to_str()

    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # Vocabularies trained on HTML hold "</s>" as a plain token.
    candidates = [t for t in EOD_TOKENS if t in special] or [t for t in EOD_TOKENS if t in vocabulary]
    eod_token, eod_id = None, None
    if request["need_eod"] or request["eod_token"] or tokenizer.eos_token:
        eod_token, eod_id = _eod(request["eod_token"], tokenizer, vocabulary, candidates, name)

    added = backend.encode("", add_special_tokens=add)
    highest = max(*vocabulary.values(), *added.ids, 0)
    dtype = "uint16" if len(tokenizer) < 65_500 else "int32"
    if highest > (0xFFFF if dtype == "uint16" else 0x7FFFFFFF):
        raise RequestError(
            f"the tokenizer {name} has {len(tokenizer):,} entries, for which Megatron-LM writes {dtype}, but ids up to "
            f"{highest:,}, which do not fit; renumber its vocabulary without gaps"
        )

    parts = hostile_texts(_added_tokens(backend))
    parts["vocabulary"] = _woven_texts(backend, sorted(vocabulary.values()))
    parts["the corpus"] = request["texts"]
    short = [[text for text in texts if len(text) < 200][:100] for texts in parts.values()]
    _check_call(tokenizer, backend, [text for texts in short for text in texts], add, name)

    def encode(asked: list[str]) -> list[Any]:
        encodings: list[Any] = backend.encode_batch_fast(asked, add_special_tokens=add)
        return encodings

    end = eod_id if request["need_eod"] else None
    prepare(work, text, parts, add, encode, end=end, encoder=request["encoder"], say=say)

    eos = tokenizer.eos_token
    return {
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "max_token_id": highest,
        "dtype": dtype,
        "eod_id": eod_id,
        "eod_token": eod_token,
        "eos_token": eos,
        "eos_is_chat": eos in CHAT_TOKENS,
        "bos_token": tokenizer.bos_token,
        "added": added.tokens,
        "eod_candidates": candidates,
    }


def _check_json(directory: Path, name: str) -> None:
    """Refuse files that are no JSON, and a tokenizer that wants to run code."""
    for path in sorted(directory.glob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{path.name} of the tokenizer {name} is no JSON ({str(error)[:200]}); copy or download it again"
            ) from error
        if not isinstance(value, dict):
            raise RequestError(f"{path.name} of the tokenizer {name} is no JSON object; copy or download it again")
        code = value.get("auto_map")
        wanted = code.get("AutoTokenizer") if isinstance(code, dict) else code
        if wanted:
            raise RequestError(
                f"the tokenizer {name} asks to run Python code of its own ({path.name}: auto_map "
                f"{json.dumps(wanted)[:100]}), which is never done here; use one with a tokenizer.json and a class "
                "of transformers, and no auto_map"
            )


def _load(directory: Path, name: str) -> tuple[Any, Any]:
    """Return the AutoTokenizer and its backend, truncation and padding off."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
    except BaseException as error:  # a Rust panic is no Exception
        said = " ".join(str(error).replace(str(directory), name).split())[:400]
        raise RequestError(
            f"transformers cannot load the tokenizer {name}: {type(error).__name__}: {said}; give the files that "
            "a tokenizer's save_pretrained() wrote, tokenizer.json among them"
        ) from error
    if backend is None:
        raise RequestError(
            f"the tokenizer {name} has no fast backend ({type(tokenizer).__name__}); load it with AutoTokenizer "
            "where its slow libraries are installed, save_pretrained() it to get a tokenizer.json, and give that"
        )
    backend.no_truncation()
    backend.no_padding()
    return tokenizer, backend


def _eod(
    asked: str | None, tokenizer: Any, vocabulary: dict[str, int], candidates: list[str], name: str
) -> tuple[str, int]:
    """Return the token that ends documents: the one asked for, else the tokenizer's eos."""
    here = f"in its vocabulary: {', '.join(candidates)}" if candidates else "its vocabulary has none of the usual ones"
    token = asked or tokenizer.eos_token
    if not token:
        raise RequestError(f"the tokenizer {name} names no eos token; give --eod-token ({here}), or --no-append-eod")
    if token not in vocabulary:
        close = difflib.get_close_matches(token, _added_tokens(tokenizer.backend_tokenizer), n=3, cutoff=0.5)
        near = f"; close to it: {', '.join(close)}" if close else ""
        raise RequestError(
            f"{token!r} is no single token of the tokenizer {name}; give another --eod-token ({here}{near})"
        )
    return str(token), vocabulary[token]


def _added_tokens(backend: Any) -> list[str]:
    return [token.content for _, token in sorted(backend.get_added_tokens_decoder().items())]


def _woven_texts(backend: Any, ids: list[int]) -> list[str]:
    """Decode random ids, so that merges of the whole vocabulary meet each other; the same each time."""
    dice = random.Random(0)
    texts = backend.decode_batch([dice.choices(ids, k=50) for _ in range(500)], skip_special_tokens=False)
    return [text for text in texts if text]


def _check_call(tokenizer: Any, backend: Any, texts: list[str], add_special_tokens: bool, name: str) -> None:
    """Refuse a tokenizer whose class does more than its backend: no encoder could equal Megatron-LM then."""
    called = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    for text, ids, encoding in zip(
        texts, called, backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens), strict=True
    ):
        if ids != encoding.ids:
            raise RequestError(
                f"the tokenizer {name} gives other ids than its own backend on {text!a} ({ids[:8]}, "
                f"{encoding.ids[:8]}); its class {type(tokenizer).__name__} is not supported"
            )


def main() -> None:
    """Settle what lies in DIRECTORY."""
    work = Path(sys.argv[1])
    gc.disable()  # a sixth of the time, in a short life
    told = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no word to the gate

    def say(word: bytes) -> None:
        with suppress(BrokenPipeError):  # a candidate that crashed is the gate's matter
            os.write(told, word)

    try:
        outcome: dict[str, Any] = {"settled": settle(work, say)}
    except RequestError as error:
        outcome = {"error": str(error)}
    (work / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
