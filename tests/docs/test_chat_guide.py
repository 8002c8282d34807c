"""docs/chat.md as its reader uses it: every command, in its order, with a test Hub in place of the Hub."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chat import conversations, make_tokenizer
from support.commandline import tokenmill
from support.documents import commands
from support.hub import Hub

pytestmark = pytest.mark.slow

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def parquet(seed: int) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(conversations(seed, 120)), data)
    return data.getvalue()


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    with Hub() as hub:
        tokenizer = make_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
        hub.add_model("Qwen/Qwen3-8B", {path.name: path.read_bytes() for path in tokenizer.iterdir()})
        names = ("train_sft-00000-of-00002", "train_sft-00001-of-00002", "test_sft-00000-of-00001")
        hub.add_dataset(
            "HuggingFaceH4/ultrachat_200k", {f"data/{name}.parquet": parquet(i) for i, name in enumerate(names)}
        )
        lines = commands("docs/chat.md", "tokenmill")
        assert [line[1] for line in lines[:4]] == ["chat", "inspect", "pack", "verify"]
        for line in lines:
            arguments = [word.replace("/data/", f"{tmp_path}/data/") for word in line[1:]]
            result = tokenmill(*arguments, hub=hub)
            assert result.code == 0, (line, result.err)
            if line[1] == "inspect":
                assert "<|im_end|>" in result.out
        root = tmp_path / "data/ultrachat"
        assert len(list((root / "chat").glob("*_mask_document.bin"))) == 2
        assert list((root / "packed").glob("*.parquet")) and list((root / "megatron").glob("*.jsonl"))
