"""The child process that loads a tokenizer: `python -m tokenmill.tokens.resolve DIRECTORY`.

Reads DIRECTORY/request.json and DIRECTORY/tokenizer/, loads them offline with transformers as Megatron-LM
does, and writes backend.json, what the gate asks of the encoders, and outcome.json: {"settled": fields of
ResolvedTokenizer} or {"error": message}. Where the tokenizer's own file is taken rather than transformers' class,
DIRECTORY/written/ gets the files from which AutoTokenizer gives the file's ids. The files are hostile: no code of
theirs runs, and what they do to the libraries ends with this process.
"""

import difflib
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.errors import RequestError
from tokenmill.tokens import sentencepiece_model
from tokenmill.tokens.encoders import quick_to_load
from tokenmill.tokens.engines.base import EncoderUnavailable, template
from tokenmill.tokens.gate import code_point_probes, hostile_texts, ignore_stops, prepare
from tokenmill.tokens.sentencepiece_model import SentencePieceModel, only_model

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


MAX_EXPANSION, FREE_CHARACTERS = 64, 4096
"""How many characters a normalizer may make of one (NFKC makes 18 at most), beyond a few thousand for any text."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KEPT_SETTINGS = ("model_max_length", "clean_up_tokenization_spaces", "chat_template")
"""Settings that change no id. Others, such as add_bos_token and added_tokens_decoder, change what the file says."""


class Loaded(NamedTuple):
    """A tokenizer as it is used: `tokenizer` the AutoTokenizer, `backend` its tokenizers.Tokenizer or the file's.

    `encode` gives the reference's encodings of a list of texts, with what `added` puts around each, and `full` is the
    backend in JSON. `special` are the tokens that text can spell, `named` the special ones of the vocabulary.
    """

    tokenizer: Any
    backend: Any
    encode: Callable[[list[str]], list[Any]]
    full: str
    added: list[str]
    special: list[str]
    named: set[str]
    parts: dict[str, list[str]]
    notes: list[str]


def settle(work: Path) -> dict[str, Any]:
    """Load the tokenizer, write backend.json and the gate's question and answer; return the settled fields."""
    request = json.loads((work / "request.json").read_bytes())
    name, add = request["reference"], request["add_special_tokens"]
    directory = work / "tokenizer"
    _check_json(directory, name)
    model = only_model(directory) if request["source"] != "class" else None
    loaded = _load_model(work, model, request) if model else _load_files(work, request)
    tokenizer, backend = loaded.tokenizer, loaded.backend

    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    # Vocabularies trained on HTML hold "</s>" as a plain token.
    candidates = [t for t in EOD_TOKENS if t in loaded.named] or [t for t in EOD_TOKENS if t in vocabulary]
    eod_token, eod_id = None, None
    if request["need_eod"] or request["eod_token"] or tokenizer.eos_token:
        eod_token, eod_id = _eod(request["eod_token"], tokenizer.eos_token, backend, candidates, name)

    around = [number for encoding in loaded.encode([""]) for number in encoding.ids]
    highest = max(*vocabulary.values(), *around, 0)
    dtype = "uint16" if len(tokenizer) < 65_500 else "int32"
    if highest > (0xFFFF if dtype == "uint16" else 0x7FFFFFFF):
        raise RequestError(
            f"the tokenizer {name} has {len(tokenizer):,} entries, for which Megatron-LM writes {dtype}, but ids up to "
            f"{highest:,}, which do not fit; renumber its vocabulary without gaps"
        )

    split = not model and (request["special_in_text"] == "split" or bool(backend.encode_special_tokens))
    text = loaded.full
    if split:
        backend.encode_special_tokens = True
        text = _without_special(text)
        (work / "full.json").write_bytes(_as_encoders_load(loaded.full))
    if model:
        shutil.copy(model, work / sentencepiece_model.NAME)
    end = eod_id if request["need_eod"] else None
    prepare(work, text, loaded.parts, add, loaded.encode, end=end, encoder=request["encoder"])

    eos = tokenizer.eos_token
    ends = add and eod_id is not None and loaded.encode(["a"])[0].ids[-1:] == [eod_id]
    settled = {
        "fingerprint": hashlib.sha256(loaded.full.encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "max_token_id": highest,
        "dtype": dtype,
        "eod_id": eod_id,
        "eod_token": eod_token,
        "eos_token": eos,
        "bos_token": tokenizer.bos_token,
        "added": loaded.added,
        "eod_candidates": candidates,
    }
    more = {
        "adds_eod": bool(ends),
        "notes": loaded.notes,
        "special": [] if split else loaded.special,
    }
    return settled | {key: value for key, value in more.items() if value}


def _texts(request: dict[str, Any], backend: Any, special: list[str] | None = None) -> dict[str, list[str]]:
    """List the texts of the gate by part, none of which the tokenizer's normalizer makes much longer."""
    parts = hostile_texts(special or _added_tokens(backend))
    parts["vocabulary"] = _woven_texts(backend, sorted(backend.get_vocab(with_added_tokens=True).values()))
    parts["the corpus"] = request["texts"]
    if backend.normalizer is not None:
        for texts in parts.values():
            for text in texts:
                length = len(backend.normalizer.normalize_str(text[:FREE_CHARACTERS]))
                if length > MAX_EXPANSION * len(text[:FREE_CHARACTERS]) + FREE_CHARACTERS:
                    raise RequestError(
                        f"the normalizer of the tokenizer {request['reference']} makes {length:,} characters of "
                        f"{len(text[:FREE_CHARACTERS]):,} ({text[:20]!a}...), more than {MAX_EXPANSION} of one; "
                        "correct it in tokenizer.json"
                    )
    return parts


def _load_files(work: Path, request: dict[str, Any]) -> Loaded:
    """Load a tokenizer by its class, or from its tokenizer.json where that is asked for; both must agree otherwise."""
    from tokenizers import Tokenizer

    name, add, source = request["reference"], request["add_special_tokens"], request["source"]
    tokenizer, backend = _load(work / "tokenizer", name)
    if request["need_eod"]:
        _check_declared(work / "tokenizer", request["eod_token"] or tokenizer.eos_token, backend, name)
    path = work / "tokenizer" / "tokenizer.json"
    if source == "file" and not path.exists():
        raise RequestError(
            f"the tokenizer {name} has no tokenizer.json and no SentencePiece model for --tokenizer-source file; leave "
            "it out"
        )
    if source != "class" and path.exists():
        own = Tokenizer.from_file(str(path))
        own.no_truncation()
        own.no_padding()
        if source == "file":
            kind = type(tokenizer).__name__
            tokenizer, written = _write_from_file(work, own, tokenizer, name)
            if wrong := _first_difference(request, written, own, add):
                raise RequestError(
                    f"transformers {_transformers()} gives other ids than tokenizer.json of the tokenizer {name} on "
                    f"{_shown(wrong, kind)}, whatever class is asked for; give --tokenizer-source class"
                )
            backend = own
        elif wrong := _first_difference(request, backend, own, add):
            raise RequestError(_choose(name, type(tokenizer).__name__, wrong))

    parts = _texts(request, backend)
    if not backend.encode_special_tokens:
        texts = [[text for text in part if len(text) < 200][:100] for part in parts.values()]
        _check_call(tokenizer, backend, [text for part in texts for text in part], add, name)

    def encode(asked: list[str]) -> list[Any]:
        encodings: list[Any] = backend.encode_batch_fast(asked, add_special_tokens=add)
        return encodings

    special = [t.content for _, t in sorted(backend.get_added_tokens_decoder().items()) if t.special and t.content]
    added = backend.encode("", add_special_tokens=add).tokens
    return Loaded(tokenizer, backend, encode, backend.to_str(), added, special, set(special), parts, [])


def _load_model(work: Path, path: Path, request: dict[str, Any]) -> Loaded:
    """Load a SentencePiece model: its ids are its own, whatever transformers' class makes of it."""
    name, add = request["reference"], request["add_special_tokens"]
    model = SentencePieceModel(path, name)
    try:
        known, theirs = _load(work / "tokenizer", name)
    except RequestError:
        known, theirs = None, None
    before, after = _around(theirs, model) if theirs and add else ([], [])
    own = model.converted(before, after, special=False)
    if request["need_eod"] and known:
        _check_declared(work / "tokenizer", request["eod_token"] or known.eos_token, theirs, name)
    eos = (known.eos_token if known else None) or model.eos
    notes = []
    if theirs and (wrong := _first_difference(request, theirs, own, False, model)):
        notes.append(
            f"{path.name} of the tokenizer {name} is taken as SentencePiece reads it (and Megatron-LM's "
            f"SentencePieceTokenizer); {type(known).__name__} of transformers {_transformers()} gives other ids on "
            f"{_shown(wrong, 'class')}: for those, give --tokenizer-source class (in a chart: --set "
            "tokenizer.source=class)"
        )
    settings = {role: getattr(known, role, None) for role in SPECIAL_NAMES} if known else {"eos_token": eos}
    tokenizer, _ = _write(work, model.converted(before, after, special=True), settings, model.pieces, name)

    def encode(asked: list[str]) -> list[Any]:
        return list(model.encode(asked, before, after))

    added = [model.pieces[number] for number in (*before, *after)]
    parts = _texts(request, own, model.spelled)
    return Loaded(tokenizer, own, encode, own.to_str(), added, [], set(model.spelled), parts, notes)


def _around(backend: Any, model: SentencePieceModel) -> tuple[list[int], list[int]]:
    """Return the ids that a class puts before and after each text."""
    bare, whole = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            before, after = whole[:start], whole[start + len(bare) :]
            if max([*before, *after], default=0) < len(model.pieces):
                return before, after
    return [], []


def _write_from_file(work: Path, own: Any, known: Any, name: str) -> tuple[Any, Any]:
    settings = {role: getattr(known, role, None) for role in SPECIAL_NAMES}
    return _write(work, own, settings, own.get_vocab(with_added_tokens=True), name)


def _write(work: Path, own: Any, tokens: dict[str, Any], vocabulary: Any, name: str) -> tuple[Any, Any]:
    """Write files from which AutoTokenizer takes tokenizer.json as it is, and load them so.

    PreTrainedTokenizerFast is the class that does so in transformers 4 and 5; in 5 a config.json of some models
    overrules it, so that there is none. Tokens that are no entry of the vocabulary would become new ids.
    """
    source, written = work / "tokenizer", work / "written"
    written.mkdir()
    if (source / "tokenizer.json").exists():
        shutil.copy(source / "tokenizer.json", written)
    else:
        own.save(str(written / "tokenizer.json"))
    for other in ("chat_template.jinja", "generation_config.json", *sentencepiece_model.MODELS):
        if (source / other).exists():
            shutil.copy(source / other, written)
    given: dict[str, Any] = {}
    if (source / "tokenizer_config.json").exists():
        given = json.loads((source / "tokenizer_config.json").read_bytes())
    settings = {key: given[key] for key in KEPT_SETTINGS if key in given}
    settings |= {role: str(token) for role, token in tokens.items() if token and str(token) in vocabulary}
    prefix = json.loads(own.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in prefix:  # transformers 4 changes the file's to its own default, which is false
        settings["add_prefix_space"] = prefix["add_prefix_space"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (written / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return _load(written, name)


class _Difference(NamedTuple):
    """A text, and the ids of the class and of the file near the first that differ."""

    text: str
    theirs: list[int]
    own: list[int]


def _first_difference(
    request: dict[str, Any], theirs: Any, own: Any, add: bool, model: SentencePieceModel | None = None
) -> _Difference | None:
    """Return the first text on which a class and the file differ, the corpus's own texts first.

    `model` is the SentencePiece model that stands for the file; texts with its control symbols are no matter of it.
    """
    if model is None and (theirs.to_str() == own.to_str() or _what_decides(theirs) == _what_decides(own)):
        return None
    control = model.special if model else []
    parts, chunks = _texts(request, own, model.spelled if model else _added_tokens(theirs)), code_point_probes(True)
    ordered = {"the corpus": parts["the corpus"]} | parts
    for texts in (*ordered.values(), ["".join(chunks[i : i + 64]) for i in range(0, len(chunks), 64)]):
        for first in range(0, len(texts), 256):
            some = [text for text in texts[first : first + 256] if not any(token in text for token in control)]
            of_class = theirs.encode_batch_fast(some, add_special_tokens=add)
            of_file: Any = model.encode(some, [], []) if model else own.encode_batch_fast(some, add_special_tokens=add)
            for text, a, b in zip(some, of_class, of_file, strict=True):
                if a.ids != b.ids:
                    return _near(text, a.ids, b.ids, theirs)
    return None


def _what_decides(backend: Any) -> dict[str, Any]:
    """Return what of a backend decides ids: all but how it decodes, and truncation and padding, which are off."""
    value: dict[str, Any] = json.loads(backend.to_str())
    for part in ("decoder", "truncation", "padding", "version"):
        value.pop(part, None)
    with suppress(EncoderUnavailable):  # one that puts nothing around a text, or is none
        value["post_processor"] = template(value["post_processor"])
    return value


def _near(text: str, theirs: list[int], own: list[int], backend: Any) -> _Difference:
    shortest = min(len(theirs), len(own))
    place = next((k for k in range(shortest) if theirs[k] != own[k]), shortest)
    low, high = max(0, place - 2), place + 6
    spans = [span for span in backend.encode(text, add_special_tokens=False).offsets[low:high] if span[1] > span[0]]
    window = text[spans[0][0] : spans[-1][1]] if spans else text
    return _Difference(window[:80], theirs[low:high], own[low:high])


def _shown(wrong: _Difference, by: str) -> str:
    return f"{wrong.text!a} ({wrong.theirs} by {by}, {wrong.own} by the file)"


def _choose(name: str, kind: str, wrong: _Difference) -> str:
    """Word the error that a class and tokenizer.json differ: what each is, and how to choose."""
    version = _transformers()
    return (
        f"the tokenizer {name} is two tokenizers: its tokenizer.json and the class {kind}, as which transformers "
        f"{version} loads it, give other ids on {_shown(wrong, kind)}. Megatron-LM loads the directory with "
        f"AutoTokenizer of the transformers beside it: {version} gives the class's ids, transformers 4 in most cases "
        "the file's. Choose with --tokenizer-source file (in a chart: --set tokenizer.source=file), for which the copy "
        "beside the data is written so that training gets the file's ids too, or --tokenizer-source class"
    )


def _transformers() -> str:
    from importlib.metadata import version

    return version("transformers")


def _without_special(backend: str) -> str:
    """Return a backend's JSON without its special tokens, so that text which spells one is text."""
    value = json.loads(backend)
    value["added_tokens"] = [token for token in value["added_tokens"] if not token["special"]]
    return json.dumps(value)


def _as_encoders_load(backend: str) -> bytes:
    import orjson

    return orjson.dumps(quick_to_load(orjson.loads(backend)))


def _check_declared(directory: Path, token: str | None, backend: Any, name: str) -> None:
    """Refuse an EOD that no file gives an id: transformers made a new one, which no vocabulary has."""
    if not token or backend.token_to_id(token) is None:
        return
    declared: set[str] = set()
    if (directory / "tokenizer.json").exists():
        value = json.loads((directory / "tokenizer.json").read_bytes())
        entries = value.get("model", {}).get("vocab", {})
        declared |= set(entries) if isinstance(entries, dict) else {entry[0] for entry in entries}
        declared |= {entry["content"] for entry in value.get("added_tokens") or []}
    elif model := only_model(directory):
        declared |= set(SentencePieceModel(model, name).pieces)
    elif (directory / "vocab.json").exists():
        declared |= set(json.loads((directory / "vocab.json").read_bytes()))
    elif (directory / "vocab.txt").exists():
        declared |= set((directory / "vocab.txt").read_text().splitlines())
    else:  # tiktoken's ranks, to which the class adds
        return
    for other, key in (("added_tokens.json", None), ("tokenizer_config.json", "added_tokens_decoder")):
        if (directory / other).exists():
            value = json.loads((directory / other).read_bytes())
            entries = value.get(key) or {} if key else value
            declared |= {entry["content"] for entry in entries.values()} if key else set(entries)
    candidates = [other for other in EOD_TOKENS if other in declared]
    if token not in declared:
        raise RequestError(
            f"{token!r}, which is to end documents, is no entry of the vocabulary of the tokenizer {name}: "
            f"transformers gives it a new id; give --eod-token ({_here(candidates)}), or correct eos_token in "
            "tokenizer_config.json"
        )


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


def _here(candidates: list[str]) -> str:
    return f"in its vocabulary: {', '.join(candidates)}" if candidates else "its vocabulary has none of the usual ones"


def _eod(asked: str | None, eos: str | None, backend: Any, candidates: list[str], name: str) -> tuple[str, int]:
    """Return the token that ends documents: the one asked for, else the tokenizer's eos."""
    token = asked or eos
    if not token:
        raise RequestError(
            f"the tokenizer {name} names no eos token; give --eod-token ({_here(candidates)}), or --no-append-eod"
        )
    number = backend.token_to_id(token)
    if number is None:
        close = difflib.get_close_matches(token, _added_tokens(backend), n=3, cutoff=0.5)
        near = f"; close to it: {', '.join(close)}" if close else ""
        raise RequestError(
            f"{token!r} is no single token of the tokenizer {name}; give another --eod-token "
            f"({_here(candidates)}{near})"
        )
    return str(token), int(number)


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
    ignore_stops()
    work = Path(sys.argv[1])
    try:
        outcome: dict[str, Any] = {"settled": settle(work)}
    except RequestError as error:
        outcome = {"error": str(error)}
    (work / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
