"""The usual alternatives, each as a process: `alternatives.py NAME TOKENIZER CORPUS [OUTPUT | PART/PARTS | TEMPLATE]`.

Each alternative uses one thread. The last line of its output is {"tokens": N, ...}, with which the benchmark checks
that all sides did the same work. hf, fastokens and gigatoken load the tokenizer.json, read the texts of a plain .jsonl
(or of one of several equal parts of it), encode them, and discard the ids. They measure the time to load and the time
to encode, without the reading. nemotron reads conversations, and renders and encodes them with transformers.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BATCH, BATCH_BYTES = 1000, 4 << 20


def hf(tokenizer: str) -> Callable[[list[str]], int]:
    """Load Hugging Face tokenizers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    return lambda texts: sum(map(len, encoder.encode_batch_fast(texts)))


def fastokens(tokenizer: str) -> Callable[[list[str]], int]:
    """Load fastokens, in one thread."""
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    import fastokens

    encoder = fastokens.Tokenizer.from_file(tokenizer)
    return lambda texts: len(encoder.encode_batch_flat(texts, add_special_tokens=True)[0]) // 4


def gigatoken(tokenizer: str) -> Callable[[list[str]], int]:
    """Load gigatoken, which adds no special tokens."""
    import gigatoken

    encoder = gigatoken.Tokenizer(tokenizer)

    def encode(texts: list[str]) -> int:
        offsets = encoder.encode_batch(texts, parallel=False).layout.offsets.data
        return int(offsets[-1] - offsets[0])

    return encode


ENCODERS = {"hf": hf, "fastokens": fastokens, "gigatoken": gigatoken}


def batches(corpus: Path, part: int, parts: int) -> Iterator[list[str]]:
    """Yield the texts of the lines that start in this part of the file."""
    import orjson

    size = corpus.stat().st_size
    start, stop = size * part // parts, size * (part + 1) // parts
    with corpus.open("rb") as lines:
        if start:
            lines.seek(start - 1)
            lines.readline()
        texts: list[str] = []
        batch_bytes = 0
        while lines.tell() < stop:
            line = lines.readline()
            texts.append(orjson.loads(line)["text"])
            batch_bytes += len(line)
            if len(texts) == BATCH or batch_bytes > BATCH_BYTES:
                yield texts
                texts, batch_bytes = [], 0
        if texts:
            yield texts


def encode(name: str, tokenizer: Path, corpus: Path, part: str) -> dict[str, float]:
    """Load an encoder and encode a part of a corpus."""
    started = time.perf_counter()
    encoder = ENCODERS[name](str(tokenizer / "tokenizer.json"))
    load = time.perf_counter() - started
    tokens, seconds = 0, 0.0
    for texts in batches(corpus, *map(int, part.split("/"))):
        started = time.perf_counter()
        tokens += encoder(texts)
        seconds += time.perf_counter() - started
    return {"tokens": tokens, "load_seconds": load, "encode_seconds": seconds}


def datatrove(tokenizer: Path, corpus: Path, output: Path) -> dict[str, int]:
    """Run datatrove's JsonlReader and MegatronDocumentTokenizer; it adds EOD and no BOS."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer  # type: ignore[import-not-found]

    eos = json.loads((tokenizer / "tokenizer_config.json").read_bytes())["eos_token"]
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
            MegatronDocumentTokenizer(
                str(output), tokenizer_name_or_path=str(tokenizer / "tokenizer.json"), eos_token=eos
            ),
        ],
        logging_dir=str(output / "logs"),
        tasks=1,
        workers=1,
    ).run()
    # int32 above 65,536 entries, else uint16.
    entries = len(json.loads((tokenizer / "tokenizer.json").read_bytes())["model"]["vocab"])
    return {"tokens": sum(path.stat().st_size for path in output.glob("*.bin")) // (4 if entries > 65_536 else 2)}


def nemotron(tokenizer: Path, corpus: Path, template: Path) -> dict[str, float]:
    """Render and encode conversations with the algorithm of NVIDIA's nemotron, in an implementation of our own.

    The conversation is rendered up to each message. The text that a message adds is its chunk; the generation prompt
    belongs to the chunk before the answer. Each chunk is encoded alone, and the chunks of answers are trained. As with
    the other alternatives, the ids are discarded: nothing is checked, packed or written.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import orjson
    from transformers import AutoTokenizer

    started = time.perf_counter()
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    source = template.read_text()
    load = time.perf_counter() - started
    rows = tokens = trained = 0
    seconds = 0.0
    with corpus.open("rb") as lines:
        for line in lines:
            messages = orjson.loads(line)["messages"]
            started = time.perf_counter()
            before, ids, mask = "", [], []
            for number, message in enumerate(messages):
                following = messages[number + 1]["role"] if number + 1 < len(messages) else ""
                rendered = encoder.apply_chat_template(
                    messages[: number + 1],
                    chat_template=source,
                    tokenize=False,
                    add_generation_prompt=following == "assistant",
                    enable_thinking=False,  # the generation prompt of answers without reasoning
                )
                if not rendered.startswith(before):
                    raise ValueError(f"the template renders the history of row {rows} in another way")
                chunk = encoder(rendered[len(before) :], add_special_tokens=False)["input_ids"]
                ids += chunk
                mask += [int(message["role"] == "assistant")] * len(chunk)
                before = rendered
            rows, tokens, trained = rows + 1, tokens + len(ids), trained + sum(mask)
            seconds += time.perf_counter() - started
    return {"rows": rows, "tokens": tokens, "trained": trained, "load_seconds": load, "encode_seconds": seconds}


def main() -> None:
    """Run an alternative, and print its result."""
    name, tokenizer, corpus, last = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    if name == "datatrove":
        result: dict[str, float] = dict(datatrove(tokenizer, corpus, Path(last)))
    elif name == "nemotron":
        result = nemotron(tokenizer, corpus, Path(last))
    else:
        result = encode(name, tokenizer, corpus, last)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
