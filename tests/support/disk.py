"""A small file system, really mounted, which a test can fill or make read-only."""

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

    def unmount(self) -> None:
        """Unmount the file system."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    @staticmethod
    def _mount(*arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())
