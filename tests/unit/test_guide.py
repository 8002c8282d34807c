"""The reader of documents for the end-to-end tests: it must not overlook a command."""

from pathlib import Path

import pytest

from e2e.guide import blocks, is_printed

DOCUMENT = """\
# A guide

## First

```sh
export A=1
helm install x charts/y \\
  --set a=b \\
  --set c=d
```

```text
done ...
```

## Second

```sh
python - <<'END'
print(1)

END
ls
```
"""


def test_a_document_is_read_command_by_command(tmp_path: Path) -> None:
    (tmp_path / "guide.md").write_text(DOCUMENT)
    first, second = blocks(tmp_path / "guide.md")
    assert first.heading == "First" and first.output == ("done ...",)
    assert [(command.text, command.source) for command in first.commands] == [
        ("export A=1", "guide.md:6"),
        ("helm install x charts/y --set a=b --set c=d", "guide.md:7"),
    ]
    assert second.heading == "Second" and second.output == ()
    assert [(command.text, command.source) for command in second.commands] == [
        ("python - <<'END'\nprint(1)\n\nEND", "guide.md:19"),
        ("ls", "guide.md:23"),
    ]


def test_overlooked_block_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "guide.md").write_text("```bash\nls\n```\n")
    with pytest.raises(AssertionError, match=r"guide\.md:1: a block of 'bash' is neither run nor compared"):
        blocks(tmp_path / "guide.md")


def test_printed_line_differs_only_in_dots_and_blanks() -> None:
    assert is_printed("100", "a\n100\n") and not is_printed("100", "1000\n")
    assert is_printed("Num documents: 50", "Num  documents:\t50") and not is_printed(
        "Num documents: 50", "Num documents: 501"
    )
    assert is_printed("tensor ... done", "tensor 2 x 3 done") and not is_printed(
        "tensor ... done", "tensor 2 x 3 done?"
    )
    assert not is_printed("a.c", "abc")
