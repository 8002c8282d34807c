"""The documents, as their readers use them."""

import re
import shlex
from pathlib import Path

from support.rendering import ROOT


def commands(name: str, *programs: str) -> list[list[str]]:
    """Return the commands of these programs in a document's shell blocks, as argument lists."""
    result = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            program = Path(line.split()[0]).name if line.split() else ""
            if program in programs:
                result.append(shlex.split(line.partition(" |")[0], comments=True))
    return result
