"""docs/chat.md as its reader uses it: every command, in its order, with a test Hub in place of the Hub."""

import ast
import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chat import conversations, make_tokenizer
from support.commandline import tokenmill
from support.documents import commands
from support.hub import Hub
from support.rendering import ROOT
from tokenmill.records import parse
from tokenmill.stages.chat.completeness import KINDS
from tokenmill.stages.chat.lengths import OVER_LONG
from tokenmill.stages.chat.rows import ALIASES, PREFERENCE, ROLES
from tokenmill.stages.chat.turns import NO_PROMPT, UNRENDERED
from tokenmill.stages.transform import unit

PAGE = (ROOT / "docs/chat.md").read_text()
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


INSTRUCTIONS = [
    {"instruction": "Name a river", "input": "", "output": "the old river"},
    {"instruction": "Write the number", "input": "seven", "output": "7"},
]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data)
    return data.getvalue()


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = re.findall(r"^```python\n# alpaca.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "alpaca.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    with Hub() as hub:
        tokenizer = make_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
        hub.add_model("Qwen/Qwen3-8B", {path.name: path.read_bytes() for path in tokenizer.iterdir()})
        names = ("train_sft-00000-of-00002", "train_sft-00001-of-00002", "test_sft-00000-of-00001")
        hub.add_dataset(
            "HuggingFaceH4/ultrachat_200k",
            {f"data/{name}.parquet": parquet(conversations(i, 120)) for i, name in enumerate(names)},
        )
        hub.add_dataset("tatsu-lab/alpaca", {"data/train-00000-of-00001.parquet": parquet(INSTRUCTIONS)})
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
        shown = tokenmill("inspect", tmp_path / "data/alpaca/chat", "--document", 1, "--mask", "--json")
        assert [(part["text"], part["trained"]) for part in shown.result["sequences"][0]["text"]] == [
            ("<|im_start|>user\nWrite the number\n\nseven<|im_end|>\n<|im_start|>assistant\n", False),
            ("7<|im_end|>\n", True),
        ]


def codes_in_the_code() -> set[str]:
    """Return the code of each BadRow, the codes of rejected records, and those of transforms."""
    codes = {f"{UNRENDERED}{kind}" for kind in KINDS}
    for path in (ROOT / "jobs/tokenmill/stages/chat").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "BadRow":
                code = node.args[0]
                if isinstance(code, ast.Constant):
                    codes.add(str(code.value))
                elif isinstance(code, ast.JoinedStr) and isinstance(code.values[-1], ast.Constant):
                    codes.add(f"{UNRENDERED}{code.values[-1].value!s}")
    return codes | {
        NO_PROMPT,
        OVER_LONG,
        PREFERENCE,
        parse.INVALID_JSON,
        parse.NO_OBJECT,
        parse.INVALID_TEXT,
        parse.TOO_LONG,
        unit.FAILED,
        unit.REFUSED,
        unit.NOT_AN_OBJECT,
    }


def test_table_of_codes_is_complete() -> None:
    (table,) = re.findall(r"^\| code \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    documented = [code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(documented) == sorted(codes_in_the_code())


def test_table_of_roles_is_complete() -> None:
    (table,) = re.findall(r"^\| role \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines()]
    assert {name: role for role, *names in rows for name in names if name not in ROLES} == dict(ALIASES)
    assert {role for row in table.splitlines() for role in re.findall(r"`(\w+)`", row.split("|")[1])} == set(ROLES)
