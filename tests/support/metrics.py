"""Metrics of a command: scrape its port, read its file, and check both with promtool."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Exposition:
    """Metrics in Prometheus' text format."""

    def __init__(self, text: str) -> None:
        """Parse a text, and check it with promtool if it is installed."""
        self.text = text
        self.series: Series = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        if promtool := shutil.which("promtool"):
            command = [promtool, "check", "metrics"]
            check = subprocess.run(command, check=False, input=text, text=True, capture_output=True)
            assert check.returncode == 0, check.stdout + check.stderr

    def get(self, name: str, **labels: str) -> float | None:
        """Return the value of the only series with a name and these labels, None if there is none."""
        values = self.all(name, **labels)
        assert len(values) <= 1, values
        return values[0] if values else None

    def all(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series with a name and these labels."""
        wanted = set(labels.items())
        return [value for (known, found), value in self.series.items() if known == name and wanted <= found]


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def scrape(port: int) -> Exposition | None:
    """Return the metrics that a process serves, None if none listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return Exposition(response.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return None


def scrape_until(port: int, condition: Callable[[Exposition], object], seconds: float = 60) -> Exposition:
    """Scrape until the metrics meet a condition."""
    deadline = time.monotonic() + seconds
    while True:
        exposition = scrape(port)
        if exposition and condition(exposition):
            return exposition
        assert time.monotonic() < deadline, exposition.text if exposition else "no response"
        time.sleep(0.05)


def read_exposition(path: Path) -> Exposition:
    """Return the metrics in a file."""
    return Exposition(path.read_text())


@contextmanager
def start_pushgateway() -> Iterator[int]:
    """Run an empty Pushgateway, and yield its port."""
    port = free_port()
    options = [
        f"--web.listen-address=127.0.0.1:{port}",
        "--persistence.file=",
    ]  # Debian's default is a file of all users
    process = subprocess.Popen(["prometheus-pushgateway", *options], stderr=subprocess.DEVNULL)
    try:
        scrape_until(port, lambda metrics: True)
        yield port
    finally:
        process.terminate()
        process.wait()
