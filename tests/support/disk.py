"""A small file system, really mounted, which a test can fill or make read-only."""

import contextlib
import shutil
import subprocess
from pathlib import Path


class Disk:
    """A small file system, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        """Mount the file system."""
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=64m", "tokenmill-test", str(path))

    def remount(self, options: str) -> None:
        """Change the size of the file system, or whether it is writable."""
        self._mount("-o", f"remount,{options}", str(self.path))

    @property
    def is_full(self) -> bool:
        """Return whether the file of `fill` exists."""
        return (self.path / "filler").exists()

    def fill(self, leave: int = 0) -> None:
        """Leave no byte, or so many, on the file system, even if another process writes at the same time."""
        with (self.path / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while (size := shutil.disk_usage(self.path).free - leave) >= 4096:
                file.write(bytes(min(size, 1 << 20)))

    def free(self) -> None:
        """Remove the file of `fill`."""
        (self.path / "filler").unlink(missing_ok=True)

    def unmount(self) -> None:
        """Unmount the file system."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    @staticmethod
    def _mount(*arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())


def fill(directory: Path) -> None:
    """Leave no byte on a file system."""
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
