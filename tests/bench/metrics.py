"""The cost of metrics: preprocess with a port that is scraped each second, compared with preprocess without metrics."""

import socket
import threading
import urllib.error
import urllib.request
from functools import partial

from .measure import Failed, Run
from .mill import Setting
from .report import Figure, Section

SCRAPE_SECONDS = 1.0
"""Prometheus' default is a minute; charts/monitoring has 30 seconds."""


def metrics(s: Setting) -> Section:
    """Compare the CPU time of a worker with and without metrics."""
    tokenizer, corpus = "llama3_1", s.large
    output = s.planned(tokenizer, corpus.input)
    worker = partial(s.worker, tokenizer, corpus.input, output)
    runs = s.in_rounds({"without": worker, "scraped": partial(scraped, s, tokenizer)})
    section = Section(f"preprocess with metrics, {corpus.megabytes:.0f} MB, one CPU, scraped each second")
    pairs = zip(runs["scraped"], runs["without"], strict=True)
    cost = [100 * (observed.cpu_seconds / alone.cpu_seconds - 1) for observed, alone in pairs]
    section.figures.append(Figure("CPU time for metrics", "the same worker without", cost, unit="%", most=1.0))
    section.add_runs(runs, corpus.megabytes)
    return section


def scraped(s: Setting, tokenizer: str) -> Run:
    """Run a worker, and scrape it each second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    ended, scrapes = threading.Event(), list[int]()

    def scrape() -> None:
        while not ended.wait(SCRAPE_SECONDS):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                    scrapes.append(len(response.read()))
            except (urllib.error.URLError, ConnectionError):
                continue

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        listen = ("--metrics-listen", f"127.0.0.1:{port}")
        done = s.worker(tokenizer, s.large.input, s.scratch / "planned", *listen)
    finally:
        ended.set()
        thread.join()
    if not scrapes and not s.quick:
        raise Failed("the worker was not scraped")
    return done
