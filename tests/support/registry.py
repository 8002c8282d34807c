"""A registry in memory on this machine, to which Helm pushes charts."""

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.rendering import TOOLS


@contextmanager
def serve_registry() -> Iterator[str]:
    """Run a registry without TLS; yield its address, HOST:PORT."""
    with subprocess.Popen([TOOLS / "oci-registry", "-port=0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = process.stderr.readline()
        match = re.search(r"serving on port (\d+)", line)
        assert match, line
        threading.Thread(target=process.stderr.read, daemon=True).start()  # the log of requests must not fill the pipe
        yield f"localhost:{match[1]}"
        process.terminate()
