"""The subprocess that loads a tokenizer: `python -m tokenmill.tokenize.resolve DIRECTORY`.

`tokenize.tokenizer` starts it. The subprocess reads DIRECTORY/request.json and DIRECTORY/tokenizer/, and loads the
tokenizer offline with transformers, as Megatron-LM does. It writes

    backend.json, question.json, reference.npz    the input of the parity gate (`tokenize.gate`)
    outcome.json                                  ResolveOutcome
    written/                                      if the ids are those of the tokenizer's file and not of transformers'
                                                  class: files from which AutoTokenizer gives the file's ids

The files are untrusted: the subprocess never runs their code, and their effects on the libraries end with the
subprocess.
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
from typing import Any, Literal, NamedTuple

from tokenmill.core.json_lines import format_json
from tokenmill.core.machine import ignore_stop_signals
from tokenmill.core.typed_json import JsonObject, convert_json
from tokenmill.errors import RequestError
from tokenmill.tokenize import sentencepiece_model
from tokenmill.tokenize.encoders import optimize_backend
from tokenmill.tokenize.engines.base import EncoderUnavailable, template_ids
from tokenmill.tokenize.gate import adversarial_texts, code_point_probes, write_gate_files
from tokenmill.tokenize.resolution import LoadedFields, ResolveOutcome, TokenizerRequest
from tokenmill.tokenize.sentencepiece_model import SentencePieceModel, find_only_model
from tokenmill.tokenize.tokenizer_files import ADDITIONAL_TEMPLATES, KEPT_SETTINGS

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
"""Usual names of the EOD token; messages list those that are in a vocabulary."""

MAX_EXPANSION, EXPANSION_ALLOWANCE = 64, 4096
"""Limit of characters that a normalizer may return: MAX_EXPANSION for each character, and the allowance for a text.

NFKC returns at most 18 characters for one character.
"""

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LoadedTokenizer(NamedTuple):
    """A loaded tokenizer: the AutoTokenizer, and its tokenizers.Tokenizer or that of the tokenizer's file (`backend`).

    `encode` returns the reference encodings of a list of texts, with the `added_tokens` around each text.
    `backend_json` is the complete backend. `spellable_tokens` are the special tokens that a text can contain, and
    `special_tokens` the special tokens of the vocabulary. `parts` are the gate's texts, `notes` the warnings.
    """

    tokenizer: Any
    backend: Any
    encode: Callable[[list[str]], list[Any]]
    backend_json: str
    added_tokens: list[str]
    spellable_tokens: list[str]
    special_tokens: set[str]
    parts: dict[str, list[str]]
    notes: list[str]


def resolve(work: Path) -> ResolveOutcome:
    """Load the tokenizer, write the input of the gate, and return the tokenizer's fields and special tokens."""
    request = convert_json(json.loads((work / "request.json").read_bytes()), TokenizerRequest)
    name, add = request.reference, request.add_special_tokens
    directory = work / "tokenizer"
    _check_json(directory, name)
    model = find_only_model(directory) if request.source != "class" else None
    loaded = _load_model(work, model, request) if model else _load_files(work, request)
    tokenizer, backend = loaded.tokenizer, loaded.backend

    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    # Vocabularies that were trained on HTML contain "</s>" as a plain token.
    candidates = [t for t in EOD_TOKENS if t in loaded.special_tokens] or [t for t in EOD_TOKENS if t in vocabulary]
    eod_token, eod_id = None, None
    if request.need_eod or request.eod_token or tokenizer.eos_token:
        eod_token, eod_id = _resolve_eod(request.eod_token, tokenizer.eos_token, backend, candidates, name)

    surrounding_ids = [number for encoding in loaded.encode([""]) for number in encoding.ids]
    max_id = max(*vocabulary.values(), *surrounding_ids, 0)
    dtype: Literal["uint16", "int32"] = "uint16" if len(tokenizer) < 65_500 else "int32"
    if max_id > (0xFFFF if dtype == "uint16" else 0x7FFFFFFF):
        raise RequestError(
            f"the tokenizer {name} has {len(tokenizer):,} entries, for which Megatron-LM writes {dtype}, and ids up to "
            f"{max_id:,}, which do not fit this type; correct its vocabulary so that the ids have no gaps"
        )

    split = not model and (request.special_in_text == "split" or bool(backend.encode_special_tokens))
    backend_json = loaded.backend_json
    if split:
        backend.encode_special_tokens = True
        backend_json = _remove_special_tokens(backend_json)
        (work / "full.json").write_bytes(_dump_optimized(loaded.backend_json))
    if model:
        shutil.copy(model, work / sentencepiece_model.FILE_NAME)
    end = eod_id if request.need_eod else None
    write_gate_files(work, backend_json, loaded.parts, add, loaded.encode, end=end, encoder=request.encoder)

    appends_eod = add and eod_id is not None and loaded.encode(["a"])[0].ids[-1:] == [eod_id]
    fields = LoadedFields(
        fingerprint=hashlib.sha256(loaded.backend_json.encode()).hexdigest(),
        vocab_size=len(tokenizer),
        max_token_id=max_id,
        dtype=dtype,
        eod_id=eod_id,
        eod_token=eod_token,
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
        added=tuple(loaded.added_tokens),
        eod_candidates=tuple(candidates),
        adds_eod=bool(appends_eod),
        notes=tuple(loaded.notes),
    )
    return ResolveOutcome(fields, [] if split else loaded.spellable_tokens)


def _gate_texts(request: TokenizerRequest, backend: Any, special: list[str] | None = None) -> dict[str, list[str]]:
    """Return the texts of the gate by part; raise RequestError if the normalizer expands a text too much."""
    parts = adversarial_texts(special or _added_tokens(backend))
    parts["vocabulary"] = _random_vocabulary_texts(backend, sorted(backend.get_vocab(with_added_tokens=True).values()))
    parts["the corpus"] = request.texts
    if backend.normalizer is not None:
        for texts in parts.values():
            for text in texts:
                length = len(backend.normalizer.normalize_str(text[:EXPANSION_ALLOWANCE]))
                if length > MAX_EXPANSION * len(text[:EXPANSION_ALLOWANCE]) + EXPANSION_ALLOWANCE:
                    raise RequestError(
                        f"the normalizer of the tokenizer {request.reference} returns {length:,} characters for "
                        f"{len(text[:EXPANSION_ALLOWANCE]):,} ({text[:20]!a}...), more than {MAX_EXPANSION} for each; "
                        "correct the normalizer in tokenizer.json"
                    )
    return parts


def _load_files(work: Path, request: TokenizerRequest) -> LoadedTokenizer:
    """Load a tokenizer with its class, or from its tokenizer.json if the request's source is "file".

    Without a source, both must give the same ids.
    """
    from tokenizers import Tokenizer

    name, add, source = request.reference, request.add_special_tokens, request.source
    tokenizer, backend = _load_auto_tokenizer(work / "tokenizer", name)
    if request.need_eod:
        _check_eod_is_declared(work / "tokenizer", request.eod_token or tokenizer.eos_token, backend, name)
    path = work / "tokenizer" / "tokenizer.json"
    if source == "file" and not path.exists():
        raise RequestError(
            f"the tokenizer {name} has no tokenizer.json and no SentencePiece model for --tokenizer-source file; "
            "remove this option"
        )
    if source != "class" and path.exists():
        file_backend = Tokenizer.from_file(str(path))
        file_backend.no_truncation()
        file_backend.no_padding()
        if source == "file":
            class_name = type(tokenizer).__name__
            tokenizer, written_backend = _write_from_file(work, file_backend, tokenizer, name)
            if difference := _first_difference(request, written_backend, file_backend, add):
                raise RequestError(
                    f"transformers {_transformers_version()} gives other ids than tokenizer.json of the tokenizer "
                    f"{name} on {_format_difference(difference, class_name)} with every class; use "
                    "--tokenizer-source class"
                )
            backend = file_backend
        elif difference := _first_difference(request, backend, file_backend, add):
            raise RequestError(_source_conflict_message(name, type(tokenizer).__name__, difference))

    parts = _gate_texts(request, backend)
    if not backend.encode_special_tokens:
        short_texts = [[text for text in part if len(text) < 200][:100] for part in parts.values()]
        _check_class_equals_backend(tokenizer, backend, [text for part in short_texts for text in part], add, name)

    def encode(texts: list[str]) -> list[Any]:
        encodings: list[Any] = backend.encode_batch_fast(texts, add_special_tokens=add)
        return encodings

    special = [t.content for _, t in sorted(backend.get_added_tokens_decoder().items()) if t.special and t.content]
    added = backend.encode("", add_special_tokens=add).tokens
    return LoadedTokenizer(tokenizer, backend, encode, backend.to_str(), added, special, set(special), parts, [])


def _load_model(work: Path, path: Path, request: TokenizerRequest) -> LoadedTokenizer:
    """Load a SentencePiece model; the ids are SentencePiece's, also if transformers' class gives other ids."""
    name, add = request.reference, request.add_special_tokens
    model = SentencePieceModel(path, name)
    try:
        class_tokenizer, class_backend = _load_auto_tokenizer(work / "tokenizer", name)
    except RequestError:
        class_tokenizer, class_backend = None, None
    before, after = _surrounding_ids(class_backend, model) if class_backend and add else ([], [])
    backend = model.to_tokenizer(before, after, with_special_tokens=False)
    if request.need_eod and class_tokenizer:
        _check_eod_is_declared(work / "tokenizer", request.eod_token or class_tokenizer.eos_token, class_backend, name)
    eos = (class_tokenizer.eos_token if class_tokenizer else None) or model.eos
    notes = []
    if class_backend and (difference := _first_difference(request, class_backend, backend, False, model)):
        notes.append(
            f"the ids of the tokenizer {name} are those that SentencePiece (and Megatron-LM's SentencePieceTokenizer) "
            f"gives for {path.name}; {type(class_tokenizer).__name__} of transformers {_transformers_version()} gives "
            f"other ids on {_format_difference(difference, 'class')}. To get the class's ids, set --tokenizer-source "
            "class (in a chart: --set tokenizer.source=class)"
        )
    settings = (
        {role: getattr(class_tokenizer, role, None) for role in SPECIAL_TOKEN_ROLES}
        if class_tokenizer
        else {"eos_token": eos}
    )
    tokenizer, _ = _write(
        work, model.to_tokenizer(before, after, with_special_tokens=True), settings, model.pieces, name
    )

    def encode(texts: list[str]) -> list[Any]:
        return list(model.encode(texts, before, after))

    added = [model.pieces[number] for number in (*before, *after)]
    parts = _gate_texts(request, backend, model.symbols)
    return LoadedTokenizer(tokenizer, backend, encode, backend.to_str(), added, [], set(model.symbols), parts, notes)


def _surrounding_ids(backend: Any, model: SentencePieceModel) -> tuple[list[int], list[int]]:
    """Return the ids that a class adds before and after each text."""
    bare, complete = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    for start in range(len(complete) - len(bare) + 1):
        if complete[start : start + len(bare)] == bare:
            before, after = complete[:start], complete[start + len(bare) :]
            if max([*before, *after], default=0) < len(model.pieces):
                return before, after
    return [], []


def _write_from_file(work: Path, backend: Any, tokenizer: Any, name: str) -> tuple[Any, Any]:
    settings = {role: getattr(tokenizer, role, None) for role in SPECIAL_TOKEN_ROLES}
    return _write(work, backend, settings, backend.get_vocab(with_added_tokens=True), name)


def _write(work: Path, backend: Any, tokens: dict[str, object], vocabulary: Any, name: str) -> tuple[Any, Any]:
    """Write files from which AutoTokenizer gives the ids of the backend, and load them with it.

    The class PreTrainedTokenizerFast uses tokenizer.json unchanged in transformers 4 and 5. In transformers 5, the
    config.json of some models overrides the class, so the function does not copy this file. transformers would give new
    ids to tokens that are not in the vocabulary.
    """
    source, written = work / "tokenizer", work / "written"
    written.mkdir()
    if (source / "tokenizer.json").exists():
        shutil.copy(source / "tokenizer.json", written)
    else:
        backend.save(str(written / "tokenizer.json"))
    for other in (
        *("chat_template.jinja", "chat_template.json", "generation_config.json"),
        *sentencepiece_model.MODEL_NAMES,
    ):
        if (source / other).exists():
            shutil.copy(source / other, written)
    if (source / ADDITIONAL_TEMPLATES).exists():
        shutil.copytree(source / ADDITIONAL_TEMPLATES, written / ADDITIONAL_TEMPLATES)
    config: JsonObject = {}
    if (source / "tokenizer_config.json").exists():
        config = json.loads((source / "tokenizer_config.json").read_bytes())
    settings = {key: config[key] for key in KEPT_SETTINGS if key in config}
    settings |= {role: str(token) for role, token in tokens.items() if token and str(token) in vocabulary}
    pre_tokenizer = json.loads(backend.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:  # transformers 4 replaces the file's value with its default, false
        settings["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (written / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return _load_auto_tokenizer(written, name)


class _Difference(NamedTuple):
    """A text for which a class and the file give different ids, and the ids next to the first difference."""

    text: str
    class_ids: list[int]
    file_ids: list[int]


def _first_difference(
    request: TokenizerRequest,
    class_backend: Any,
    file_backend: Any,
    add: bool,
    model: SentencePieceModel | None = None,
) -> _Difference | None:
    """Return the first text for which a class and the file give different ids; the corpus's texts come first.

    `model` is the SentencePiece model that replaces the file. The function skips texts with its control symbols.
    """
    if model is None and (
        class_backend.to_str() == file_backend.to_str() or _id_rules(class_backend) == _id_rules(file_backend)
    ):
        return None
    control_symbols = model.control_symbols if model else []
    parts, chunks = (
        _gate_texts(request, file_backend, model.symbols if model else _added_tokens(class_backend)),
        code_point_probes(True),
    )
    ordered = {"the corpus": parts["the corpus"]} | parts
    for texts in (*ordered.values(), ["".join(chunks[i : i + 64]) for i in range(0, len(chunks), 64)]):
        for first in range(0, len(texts), 256):
            batch = [
                text for text in texts[first : first + 256] if not any(symbol in text for symbol in control_symbols)
            ]
            by_class = class_backend.encode_batch_fast(batch, add_special_tokens=add)
            by_file: Any = (
                model.encode(batch, [], []) if model else file_backend.encode_batch_fast(batch, add_special_tokens=add)
            )
            for text, a, b in zip(batch, by_class, by_file, strict=True):
                if a.ids != b.ids:
                    return _excerpt_difference(text, a.ids, b.ids, class_backend)
    return None


def _id_rules(backend: Any) -> JsonObject:
    """Return the parts of a backend that determine ids, without the decoder, truncation and padding.

    Truncation and padding are disabled.
    """
    value: JsonObject = json.loads(backend.to_str())
    for part in ("decoder", "truncation", "padding", "version"):
        value.pop(part, None)
    with suppress(EncoderUnavailable):  # compare other post-processors as they are
        value["post_processor"] = template_ids(value["post_processor"])
    return value


def _excerpt_difference(text: str, class_ids: list[int], file_ids: list[int], backend: Any) -> _Difference:
    shortest = min(len(class_ids), len(file_ids))
    position = next((k for k in range(shortest) if class_ids[k] != file_ids[k]), shortest)
    low, high = max(0, position - 2), position + 6
    spans = [span for span in backend.encode(text, add_special_tokens=False).offsets[low:high] if span[1] > span[0]]
    window = text[spans[0][0] : spans[-1][1]] if spans else text
    return _Difference(window[:80], class_ids[low:high], file_ids[low:high])


def _format_difference(difference: _Difference, class_name: str) -> str:
    return f"{difference.text!a} ({difference.class_ids} by {class_name}, {difference.file_ids} by the file)"


def _source_conflict_message(name: str, class_name: str, difference: _Difference) -> str:
    """Return the error that the class and tokenizer.json give different ids, with the two remedies."""
    version = _transformers_version()
    return (
        f"the tokenizer {name} is ambiguous: its tokenizer.json and the class {class_name} of transformers "
        f"{version} give different ids on {_format_difference(difference, class_name)}. Megatron-LM uses the "
        f"AutoTokenizer of the installed transformers: {version} gives the class's ids, transformers 4 usually gives "
        "the file's ids. Set --tokenizer-source file to use the file's ids (in a chart: --set tokenizer.source=file): "
        "the copy of the tokenizer for training then gives the same ids. Or set --tokenizer-source class"
    )


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def _remove_special_tokens(backend: str) -> str:
    """Return a backend's JSON without its special tokens: encoders then encode them as ordinary text."""
    value = json.loads(backend)
    value["added_tokens"] = [token for token in value["added_tokens"] if not token["special"]]
    return json.dumps(value)


def _dump_optimized(backend: str) -> bytes:
    import orjson

    return orjson.dumps(optimize_backend(orjson.loads(backend)))


def _check_eod_is_declared(directory: Path, token: str | None, backend: Any, name: str) -> None:
    """Raise RequestError if no file gives the EOD an id: transformers then gave it an id outside the vocabulary."""
    if not token or backend.token_to_id(token) is None:
        return
    declared: set[str] = set()
    if (directory / "tokenizer.json").exists():
        value = json.loads((directory / "tokenizer.json").read_bytes())
        entries = value.get("model", {}).get("vocab", {})
        declared |= set(entries) if isinstance(entries, dict) else {entry[0] for entry in entries}
        declared |= {entry["content"] for entry in value.get("added_tokens") or []}
    elif model := find_only_model(directory):
        declared |= set(SentencePieceModel(model, name).pieces)
    elif (directory / "vocab.json").exists():
        declared |= set(json.loads((directory / "vocab.json").read_bytes()))
    elif (directory / "vocab.txt").exists():
        declared |= set((directory / "vocab.txt").read_text().splitlines())
    else:  # tiktoken's ranks: the class adds further tokens
        return
    for other, key in (("added_tokens.json", None), ("tokenizer_config.json", "added_tokens_decoder")):
        if (directory / other).exists():
            value = json.loads((directory / other).read_bytes())
            entries = value.get(key) or {} if key else value
            declared |= {entry["content"] for entry in entries.values()} if key else set(entries)
    candidates = [other for other in EOD_TOKENS if other in declared]
    if token not in declared:
        raise RequestError(
            f"the EOD token {token!r} is not in the vocabulary of the tokenizer {name}, so transformers gives it a new "
            f"id; set --eod-token ({_format_candidates(candidates)}), or correct eos_token in tokenizer_config.json"
        )


def _check_json(directory: Path, name: str) -> None:
    """Raise RequestError for a file that is not a JSON object, and for a tokenizer that requires Python code."""
    for path in sorted(directory.glob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{path.name} of the tokenizer {name} is not valid JSON ({str(error)[:200]}); copy or download it again"
            ) from error
        if not isinstance(value, dict):
            raise RequestError(f"{path.name} of the tokenizer {name} is not a JSON object; copy or download it again")
        code = value.get("auto_map")
        module = code.get("AutoTokenizer") if isinstance(code, dict) else code
        if module:
            raise RequestError(
                f"the tokenizer {name} requires its own Python code ({path.name}: auto_map "
                f"{json.dumps(module)[:100]}), which tokenmill never runs; use a tokenizer with a "
                "tokenizer.json, a class of transformers, and no auto_map"
            )


def _load_auto_tokenizer(directory: Path, name: str) -> tuple[Any, Any]:
    """Return the AutoTokenizer of a directory and its backend, without truncation and padding."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
    except BaseException as error:  # a Rust panic does not derive from Exception
        message = " ".join(str(error).replace(str(directory), name).split())[:400]
        raise RequestError(
            f"transformers cannot load the tokenizer {name}: {type(error).__name__}: {message}; use the files "
            "that the save_pretrained() of a tokenizer wrote, with tokenizer.json"
        ) from error
    if backend is None:
        raise RequestError(
            f"the tokenizer {name} has no fast backend ({type(tokenizer).__name__}); convert it: load it with "
            "AutoTokenizer where the libraries of its slow class are installed, call save_pretrained(), and use the "
            "directory with the new tokenizer.json"
        )
    backend.no_truncation()
    backend.no_padding()
    return tokenizer, backend


def _format_candidates(candidates: list[str]) -> str:
    return f"in its vocabulary: {', '.join(candidates)}" if candidates else "its vocabulary has no usual EOD token"


def _resolve_eod(
    requested: str | None, eos: str | None, backend: Any, candidates: list[str], name: str
) -> tuple[str, int]:
    """Return the EOD token and its id: the requested token, else the tokenizer's eos."""
    token = requested or eos
    if not token:
        raise RequestError(
            f"the tokenizer {name} has no eos token; set --eod-token ({_format_candidates(candidates)}), or use "
            "--no-append-eod"
        )
    number = backend.token_to_id(token)
    if number is None:
        similar_tokens = difflib.get_close_matches(token, _added_tokens(backend), n=3, cutoff=0.5)
        hint = f"; similar tokens: {', '.join(similar_tokens)}" if similar_tokens else ""
        raise RequestError(
            f"{token!r} is not a single token of the tokenizer {name}; use another --eod-token "
            f"({_format_candidates(candidates)}{hint})"
        )
    return str(token), int(number)


def _added_tokens(backend: Any) -> list[str]:
    return [token.content for _, token in sorted(backend.get_added_tokens_decoder().items())]


def _random_vocabulary_texts(backend: Any, ids: list[int]) -> list[str]:
    """Return decoded sequences of random ids, the same each time; they combine merges of the complete vocabulary."""
    rng = random.Random(0)
    texts = backend.decode_batch([rng.choices(ids, k=50) for _ in range(500)], skip_special_tokens=False)
    return [text for text in texts if text]


def _check_class_equals_backend(
    tokenizer: Any, backend: Any, texts: list[str], add_special_tokens: bool, name: str
) -> None:
    """Raise RequestError if the class gives other ids than its backend: no encoder can give Megatron-LM's ids then."""
    class_ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    for text, ids, encoding in zip(
        texts, class_ids, backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens), strict=True
    ):
        if ids != encoding.ids:
            raise RequestError(
                f"the tokenizer {name} gives other ids than its own backend on {text!a} ({ids[:8]}, "
                f"{encoding.ids[:8]}): tokenmill does not support its class {type(tokenizer).__name__}; use another "
                "tokenizer"
            )


def main() -> None:
    """Resolve the tokenizer in DIRECTORY."""
    ignore_stop_signals()
    work = Path(sys.argv[1])
    try:
        outcome = resolve(work)
    except RequestError as error:
        outcome = ResolveOutcome(error=str(error))
    (work / "outcome.json").write_text(format_json(outcome))


if __name__ == "__main__":
    main()
