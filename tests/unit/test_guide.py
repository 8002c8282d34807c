"""How the end-to-end tests read a document: what they would overlook, they would not test."""

from pathlib import Path

import pytest

from e2e.guide import blocks, prints

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
    assert first.heading == "First" and first.prints == ("done ...",)
    assert [(command.text, command.where) for command in first.commands] == [
        ("export A=1", "guide.md:6"),
        ("helm install x charts/y --set a=b --set c=d", "guide.md:7"),
    ]
    assert second.heading == "Second" and second.prints == ()
    assert [(command.text, command.where) for command in second.commands] == [
        ("python - <<'END'\nprint(1)\n\nEND", "guide.md:19"),
        ("ls", "guide.md:23"),
    ]


def test_a_block_that_would_be_overlooked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "guide.md").write_text("```bash\nls\n```\n")
    with pytest.raises(AssertionError, match=r"guide\.md:1: a block of 'bash' is neither typed nor compared"):
        blocks(tmp_path / "guide.md")


def test_a_line_is_printed_whole_but_for_dots_and_blanks() -> None:
    assert prints("100", "a\n100\n") and not prints("100", "1000\n")
    assert prints("Num documents: 50", "Num  documents:\t50") and not prints("Num documents: 50", "Num documents: 501")
    assert prints("tensor ... done", "tensor 2 x 3 done") and not prints("tensor ... done", "tensor 2 x 3 done?")
    assert not prints("a.c", "abc")
