"""What people use instead, each a whole process: `alternatives.py NAME TOKENIZER CORPUS OUTPUT`.

One thread each; prints {"tokens": N}, so that what is compared can be seen to be the same work.
"""

import json
import os
import sys
from pathlib import Path

BATCH = 1000


def hf(tokenizer: Path, corpus: Path, output: Path) -> int:
    """Encode with Hugging Face tokenizers alone: nothing is assembled or written."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import orjson
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens = 0
    texts: list[str] = []
    with corpus.open("rb") as lines:
        for line in lines:
            texts.append(orjson.loads(line)["text"])
            if len(texts) == BATCH:
                tokens += sum(map(len, encoder.encode_batch_fast(texts)))
                texts = []
    return tokens + sum(map(len, encoder.encode_batch_fast(texts)))


def datatrove(tokenizer: Path, corpus: Path, output: Path) -> int:
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
    return sum(path.stat().st_size for path in output.glob("*.bin")) // (4 if entries > 65_536 else 2)


if __name__ == "__main__":
    run = {"hf": hf, "datatrove": datatrove}[sys.argv[1]]
    print(json.dumps({"tokens": run(*map(Path, sys.argv[2:5]))}))
