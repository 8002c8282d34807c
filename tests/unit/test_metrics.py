"""Metrics of the data stages: served while a stage runs, in a file and at a Pushgateway after its end."""

import contextlib
import json
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commandline import finish, start, tokenmill
from support.corpus import TOKENIZER
from support.hub import Fault, Hub
from support.metrics import Exposition, free_port, read_exposition, scrape, scrape_until, start_pushgateway
from tokenmill.engine.metrics import MAX_REASONS, StageCollector, StageMetrics

SECRET = "hf_planted0123456789abcdef"
CONTENT = "planted content of a record"


def write_corpus(directory: Path, files: int, bad: int = 0) -> Path:
    """Write files of ten records; the first one also has `bad` lines of invalid JSON."""
    directory.mkdir()
    for number in range(files):
        lines = [json.dumps({"text": f"{CONTENT} {number} {record}"}) for record in range(10)]
        lines += [CONTENT] * (bad if number == 0 else 0)
        (directory / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def state(metrics: Exposition, stage: str) -> list[str]:
    """Return the states of a stage whose series is 1."""
    names = ("planning", "running", "finished", "failed", "stopped")
    return [name for name in names if metrics.get("tokenmill_stage_state", stage=stage, state=name)]


@pytest.mark.slow
def test_a_running_download_is_scraped(tmp_path: Path) -> None:
    port, last = free_port(), tmp_path / "last.prom"
    with Hub(token=SECRET) as hub:
        hub.add_dataset("org/corpus", {f"{n}.jsonl": f'{{"text": "{CONTENT}"}}\n'.encode() * 5000 for n in range(3)})
        hub.faults.add(Fault("429", "0.jsonl", retry="seconds", seconds=0), Fault("cut", "1.jsonl"))
        hub.faults.add(Fault("stall", "2.jsonl", seconds=300))
        process = start(
            *("download", "hf://datasets/org/corpus", tmp_path / "out", "--metrics-listen", f"127.0.0.1:{port}"),
            *("--metrics-file", last),
            hub=hub,
            HF_TOKEN=SECRET,
        )
        live = scrape_until(port, lambda metrics: metrics.get("tokenmill_stage_done_units", stage="download") == 2)
        assert live.get("tokenmill_stage_units") == 3
        assert live.get("tokenmill_stage_running_units") == 1
        assert 0 < (live.get("tokenmill_stage_done_input_bytes") or 0) < (live.get("tokenmill_stage_input_bytes") or 0)
        assert state(live, "download") == ["running"]
        assert live.get("tokenmill_requests_repeated_total", fault="throttled") == 1
        assert live.get("tokenmill_requests_repeated_total", fault="interrupted") == 1
        progress = live.get("tokenmill_stage_last_progress_timestamp_seconds")
        time.sleep(0.1)
        later = scrape(port)
        assert later and later.get("tokenmill_stage_last_progress_timestamp_seconds") == progress, "it stands still"
        process.terminate()
        assert finish(process).code == 143
    end = read_exposition(last)
    assert state(end, "download") == ["stopped"]
    assert end.get("tokenmill_stage_end_timestamp_seconds")
    assert SECRET not in live.text + end.text and CONTENT not in live.text + end.text


@pytest.mark.slow
def test_the_file_has_the_counts_of_the_output(tmp_path: Path) -> None:
    corpus, file = write_corpus(tmp_path / "corpus", files=4, bad=2), tmp_path / "last.prom"
    command = ("preprocess", corpus, tmp_path / "out", "--tokenizer", TOKENIZER, "--target-files", "2", "--json")
    arguments = ("--on-bad-record", "quarantine", "--metrics-file", file)
    result = tokenmill(*command, *arguments, "--processes", "2")
    assert result.code == 0, result.err
    counts = result.result["counts"]
    for _ in range(2):  # the second run finds all units finished
        metrics = read_exposition(file)
        assert metrics.get("tokenmill_stage_records_total") == counts["in"] == 42
        assert metrics.get("tokenmill_stage_written_records_total") == counts["out"] == 40
        assert sum(metrics.all("tokenmill_stage_rejected_records_total")) == counts["rejected"] == 2
        assert metrics.get("tokenmill_stage_tokens_total") == counts["tokens"]
        assert metrics.get("tokenmill_stage_done_units") == metrics.get("tokenmill_stage_units")
        assert metrics.get("tokenmill_stage_done_input_bytes") == metrics.get("tokenmill_stage_input_bytes")
        assert metrics.get("tokenmill_stage_info", plan=result.result["plan"], workers="1") == 1
        assert state(metrics, "preprocess") == ["finished"]
        assert CONTENT not in metrics.text
        file.unlink()
        assert tokenmill(*command, *arguments).code == 0


@pytest.mark.slow
def test_faults_in_child_processes_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "last.prom"
    with Hub() as hub:
        hub.add_dataset("org/corpus", {f"{n}.jsonl": b'{"text": "a"}\n' * 100 for n in range(4)})
        hub.faults.add(*(Fault("drop", f"{n}.jsonl") for n in range(4)))
        options = ("--tokenizer", TOKENIZER, "--processes", "2", "--target-files", "4", "--metrics-file", file)
        result = tokenmill("preprocess", "hf://datasets/org/corpus", tmp_path / "out", *options, hub=hub)
    assert result.code == 0, result.err
    assert sum(read_exposition(file).all("tokenmill_requests_repeated_total")) == 4


def test_a_failed_unit_is_counted(tmp_path: Path) -> None:
    corpus, file = write_corpus(tmp_path / "corpus", files=2, bad=2), tmp_path / "last.prom"
    options = ("--tokenizer", TOKENIZER, "--target-files", "2", "--metrics-file", file)
    assert tokenmill("preprocess", corpus, tmp_path / "out", *options).code == 2
    metrics = read_exposition(file)
    assert metrics.get("tokenmill_stage_failed_units_total", kind="permanent") == 1
    assert metrics.get("tokenmill_stage_done_units") == 1
    assert state(metrics, "preprocess") == ["failed"]


def test_all_stages_of_a_pipeline_have_metrics(tmp_path: Path) -> None:
    corpus, file = write_corpus(tmp_path / "corpus", files=2), tmp_path / "last.prom"
    result = tokenmill("run", corpus, tmp_path / "out", "--tokenizer", TOKENIZER, "--extract", "--metrics-file", file)
    assert result.code == 0, result.err
    metrics = read_exposition(file)
    for stage in ("download", "extract", "preprocess"):
        assert state(metrics, stage) == ["finished"]


@pytest.mark.skipif(not shutil.which("prometheus-pushgateway"), reason="Prometheus' Pushgateway is not installed")
def test_the_last_metrics_are_pushed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", files=1)
    with start_pushgateway() as port:
        for group in ("", "/metrics/job/extract/namespace/n%2Dm/instance/0"):
            url = f"http://127.0.0.1:{port}{group}"
            result = tokenmill("extract", corpus, tmp_path / "out", "--metrics-push", url)
            assert result.code == 0 and "warning" not in result.err, result.err
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            pushed = Exposition(response.read().decode())
    labels = {"job": "tokenmill", "instance": socket.gethostname()}
    assert pushed.get("tokenmill_stage_records_total", stage="extract", **labels) == 10
    labels = {"job": "extract", "instance": "0", "namespace": "n-m"}
    assert pushed.get("tokenmill_stage_records_total", stage="extract", **labels) == 10


@pytest.fixture
def slow_gateway() -> Iterator[str]:
    """Yield the URL of a Pushgateway that sends a byte of its response every half second, and never all of it."""
    ended = threading.Event()

    def respond(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-A: ")
            while not ended.wait(0.5):
                connection.sendall(b"a")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=respond, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        ended.set()


def test_a_slow_pushgateway_does_not_keep_a_command_from_ending(slow_gateway: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", files=1)
    result = tokenmill("extract", corpus, tmp_path / "out", "--metrics-push", slow_gateway, timeout=300)
    assert result.code == 0, result
    assert "warning: could not push metrics: the Pushgateway did not respond within 5 s" in result.err


def test_a_failed_push_changes_no_result(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", files=1)
    url = f"http://127.0.0.1:{free_port()}"
    result = tokenmill("extract", corpus, tmp_path / "out", "--metrics-push", url)
    assert result.code == 0
    assert "warning: could not push metrics" in result.err


def test_a_destination_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", files=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        used = tokenmill("extract", corpus, tmp_path / "out", "--metrics-listen", address)
    device = tokenmill("extract", corpus, tmp_path / "out", "--metrics-file", tmp_path)
    assert device.code == 2 and "is not a regular file" in device.err
    missing = tokenmill("extract", corpus, tmp_path / "out", "--metrics-file", tmp_path / "missing/last.prom")
    invalid = tokenmill("extract", corpus, tmp_path / "out", "--metrics-listen", "localhost")
    impossible = tokenmill("extract", corpus, tmp_path / "out", "--metrics-listen", "a..b:9464")
    long = tokenmill("extract", corpus, tmp_path / "out", "--metrics-file", tmp_path / f"{300 * 'x'}.prom")
    own = tokenmill("extract", corpus, tmp_path / "out", "--metrics-file", corpus / "0.jsonl")
    assert used.code == missing.code == invalid.code == impossible.code == long.code == own.code == 2
    assert "cannot serve metrics on a..b" in impossible.err
    assert "exists and contains no metrics; specify another file" in own.err
    assert "choose another address with --metrics-listen" in used.err
    assert "specify a file in an existing directory" in missing.err
    assert "127.0.0.1:9464" in invalid.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "url", ["", "gateway:9091", "http://user:secret-word@gateway:9091", "http://gateway:9091/metrics/job"]
)
def test_a_url_that_is_no_gateway_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    result = tokenmill("extract", tmp_path, tmp_path / "out", "--metrics-push", url)
    assert result.code == 2
    assert "http://HOST:9091" in result.err and "secret-word" not in result.err


def test_a_group_does_not_replace_the_metrics_own_labels(tmp_path: Path) -> None:
    result = tokenmill("extract", tmp_path, tmp_path / "out", "--metrics-push", "http://g:9091/metrics/job/j/stage/x")
    assert result.code == 2 and "have the label stage themselves; remove it" in result.err


def test_a_link_is_not_replaced_by_metrics(tmp_path: Path) -> None:
    corpus, link = write_corpus(tmp_path / "corpus", files=1), tmp_path / "link.prom"
    link.symlink_to(tmp_path / "elsewhere.prom")
    result = tokenmill("extract", corpus, tmp_path / "out", "--metrics-file", link)
    assert result.code == 2 and link.is_symlink()


def test_counters_start_with_zero() -> None:
    """A counter that starts with its first value has no rate before the second one."""
    collector = StageCollector()
    collector.start("preprocess", 0, 1)
    samples = {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}
    for name in ("records", "written_records", "tokens"):
        assert samples[f"tokenmill_stage_{name}_total"] == 0


def test_the_end_of_planning_is_progress() -> None:
    stage = StageMetrics("extract")
    planned = stage.measure()[2]
    stage.state = "running"
    assert stage.measure()[2] > planned
    assert stage.measure() == stage.measure()


def test_reasons_are_few_and_contain_no_content() -> None:
    metrics = StageMetrics("transform")
    reasons = {f"rejected.reason_{number:02d}": 1 for number in range(30)} | {f"rejected.{CONTENT}": 1}
    metrics.count({"rejected": 31, **reasons})
    labels = metrics.reasons()
    assert len(labels) == MAX_REASONS + 1 and sum(labels.values()) == 31
    assert CONTENT not in labels
