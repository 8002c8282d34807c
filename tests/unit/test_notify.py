"""Announcements of data stages: one for each outcome of a run; a receiver with faults never changes a result."""

import gzip
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, finish, start, tokenmill
from support.corpus import TOKENIZER
from support.hub import Fault, Hub
from support.metrics import free_port
from support.receiver import Receiver, Request, make_certificate, receiving, statuses
from tokenmill.engine.notify.announcer import MAX_SECONDS
from tokenmill.engine.notify.message import MAX_MESSAGE_CHARACTERS, TEMPLATES, Announcement

SECRET = "plantedsecret0123456789"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "corpus"
    directory.mkdir()
    for number in range(4):
        (directory / f"{number}.jsonl").write_text(json.dumps({"text": f"record {number}"}) + "\n")
    return directory


def concatenate(corpus: Path, *arguments: Any, url: str = "", **environment: str) -> CommandResult:
    """Concatenate a corpus with announcements to a URL."""
    variables = {"TOKENMILL_NOTIFY_URL": url, **environment}
    return tokenmill("concatenate", corpus, corpus.parent / "out", "--target-files", "4", *arguments, **variables)


def test_the_success_of_a_stage_is_announced(corpus: Path) -> None:
    with receiving() as receiver:
        result = concatenate(corpus, url=receiver.url)
        assert result.code == 0, result.err
    (message,) = receiver.messages
    assert message["event"] == "announcement"
    assert (message["outcome"], message["subject"], message["exit_code"]) == ("succeeded", "concatenate", 0)
    assert message["message"].startswith("concatenate: complete, 4 files, ")
    assert message["output"] == str(corpus.parent / "out") and message["run"] is None
    (request,) = receiver.requests
    assert request.headers["Content-Type"] == "application/json"
    assert SECRET not in result.err + result.out


def test_a_failure_is_announced_with_its_cause(corpus: Path) -> None:
    (corpus / "1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "cut off"}')[:-9])
    with receiving() as receiver:
        result = tokenmill("extract", corpus, corpus.parent / "out", TOKENMILL_NOTIFY_URL=receiver.url)
    assert result.code == 2
    (message,) = receiver.messages
    assert (message["outcome"], message["exit_code"]) == ("failed", 2)
    assert "1.jsonl.gz" in message["message"] and result.err.rstrip().endswith(message["message"])


def test_a_failure_before_the_plan_is_announced(corpus: Path) -> None:
    with receiving() as receiver:
        result = tokenmill("extract", corpus / "missing", corpus.parent / "out", TOKENMILL_NOTIFY_URL=receiver.url)
    assert result.code == 2
    assert [message["outcome"] for message in receiver.messages] == ["failed"]


def test_the_url_may_be_in_a_file(corpus: Path, tmp_path: Path) -> None:
    with receiving() as receiver:
        (tmp_path / "url").write_text(f"{receiver.url}\n")
        arguments = ("--notify-url-file", tmp_path / "url", "--notify-template", "slack")
        assert concatenate(corpus, *arguments, url="http://127.0.0.1:1/unused").code == 0
    (message,) = receiver.messages
    assert message["text"].startswith("*concatenate succeeded*: concatenate: complete, 4 files")


@pytest.mark.slow
def test_a_pipeline_has_one_announcement(corpus: Path) -> None:
    with receiving() as receiver:
        options = ("--tokenizer", TOKENIZER, "--processes", "1")
        result = tokenmill("run", corpus, corpus.parent / "out", *options, TOKENMILL_NOTIFY_URL=receiver.url)
        assert result.code == 0, result.err
    assert [(message["subject"], message["outcome"]) for message in receiver.messages] == [("run", "succeeded")]


@pytest.mark.slow
def test_the_workers_of_a_run_announce_each_outcome_once(corpus: Path) -> None:
    for path in corpus.iterdir():
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    whole = (corpus / "1.jsonl.gz").read_bytes()
    (corpus / "1.jsonl.gz").write_bytes(whole[:-9])
    run = {"TOKENMILL_RUN": "run-1", "TOKENMILL_WORKERS": "4"}
    with receiving() as receiver:
        codes = []
        for more in ((), ("--replace",)):
            for worker in range(4):
                variables = run | {"JOB_COMPLETION_INDEX": str(worker), "TOKENMILL_NOTIFY_URL": receiver.url}
                codes.append(tokenmill("extract", corpus, corpus.parent / "out", *more, **variables).code)
            (corpus / "1.jsonl.gz").write_bytes(whole)
        assert sorted(codes[:4]) == [0, 0, 0, 2] and codes[4:] == [0] * 4
        outcomes = [message["outcome"] for message in receiver.messages]
    assert outcomes == ["failed", "succeeded"]


def test_workers_with_the_same_failure_announce_it_once(corpus: Path) -> None:
    with receiving() as receiver:
        processes = [
            start(
                *("extract", corpus / "missing", corpus.parent / "out"),
                TOKENMILL_NOTIFY_URL=receiver.url,
                TOKENMILL_RUN="run-1",
                TOKENMILL_WORKERS="4",
                JOB_COMPLETION_INDEX=str(worker),
            )
            for worker in range(4)
        ]
        assert [finish(process).code for process in processes] == [2] * 4
    assert len(receiver.messages) == 1


def test_the_next_worker_announces_if_the_receiver_was_down(corpus: Path) -> None:
    run = {"TOKENMILL_RUN": "run-1", "TOKENMILL_WORKERS": "2"}
    with receiving(Receiver(answer=statuses(404, 200))) as receiver:
        for worker in range(2):
            variables = run | {"JOB_COMPLETION_INDEX": str(worker), "TOKENMILL_NOTIFY_URL": receiver.url}
            assert tokenmill("extract", corpus / "missing", corpus.parent / "out", **variables).code == 2
    assert len(receiver.messages) == 2


def test_a_failure_that_kubernetes_repeats_is_announced_at_its_last_attempt(corpus: Path) -> None:
    """A server that is down is not a permanent failure until Kubernetes starts the pod no more."""
    source = f"http://127.0.0.1:{free_port()}/corpus.jsonl"
    with receiving() as receiver:
        for failures, expected in ((0, 0), (3, 1)):
            variables = {"TOKENMILL_RUN": "run-1", "TOKENMILL_FAILURES": str(failures), "TOKENMILL_MAX_FAILURES": "3"}
            result = tokenmill(
                "download", source, corpus.parent / "out", TOKENMILL_NOTIFY_URL=receiver.url, **variables
            )
            assert result.code == 1, result.err
            assert len(receiver.messages) == expected


@pytest.mark.slow
def test_a_stopped_worker_announces_nothing(corpus: Path) -> None:
    with receiving() as receiver, Hub() as hub:
        hub.add_dataset("org/corpus", {"0.jsonl": b'{"text": "a"}\n' * 1000})
        hub.faults.add(Fault("stall", "0.jsonl", seconds=300))
        process = start(
            *("download", "hf://datasets/org/corpus", corpus.parent / "out"),
            hub=hub,
            TOKENMILL_NOTIFY_URL=receiver.url,
        )
        for line in process.stderr or ():
            if "to run, " in line:
                break
        process.terminate()
        assert finish(process).code == 143
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("answer", "count", "reason"),
    [
        pytest.param(statuses(500, 500, 200), 3, "", id="down-twice"),
        pytest.param(statuses(500), 3, "it responded 500", id="down"),
        pytest.param(statuses(429, 200, headers={"Retry-After": "1"}), 2, "", id="throttled"),
        pytest.param(statuses(429, headers={"Retry-After": "3600"}), 1, "it responded 429", id="throttled-for-an-hour"),
        pytest.param(statuses(404), 1, "it responded 404", id="missing"),
        pytest.param(
            statuses(302, headers={"Location": "http://example.org/services/plantedsecret0123456789"}),
            1,
            "it redirects to example.org, which gets no message",
            id="redirect",
        ),
    ],
)
def test_a_receiver_that_refuses_does_not_change_the_result(corpus: Path, answer: Any, count: int, reason: str) -> None:
    with receiving(Receiver(answer=answer)) as receiver:
        result = concatenate(corpus, url=receiver.url)
    assert result.code == 0
    assert len(receiver.requests) == count
    warning = f"warning: could not announce the end to 127.0.0.1: {reason}; the result does not change\n"
    assert result.err.count("could not announce") == bool(reason)
    assert not reason or warning in result.err
    assert SECRET not in result.err


def test_a_receiver_that_cannot_be_reached_does_not_change_the_result(corpus: Path) -> None:
    result = concatenate(corpus, url=f"http://127.0.0.1:{free_port()}/{SECRET}")
    assert result.code == 0
    assert "could not announce the end to 127.0.0.1: Connection refused; the result does not change" in result.err
    assert SECRET not in result.err


@pytest.mark.slow
def test_a_slow_receiver_delays_the_end_by_seconds(corpus: Path) -> None:
    with receiving(Receiver(pause=60)) as receiver:
        started = time.monotonic()
        result = concatenate(corpus, url=receiver.url)
        assert time.monotonic() - started < MAX_SECONDS + 5
    assert result.code == 0
    assert "could not announce the end to 127.0.0.1: it did not respond within 5 s" in result.err
    assert len(receiver.requests) == 1, "the receiver may have the message, so it must not get a second one"


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_sigterm_during_an_announcement_keeps_the_result(corpus: Path, outcome: str) -> None:
    with receiving(Receiver(pause=60)) as receiver:
        source = corpus if outcome == "succeeded" else corpus / "missing"
        process = start(
            *("concatenate", source, corpus.parent / "out", "--target-files", "4"), TOKENMILL_NOTIFY_URL=receiver.url
        )
        assert receiver.received.wait(30)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        result = finish(process)
        assert time.monotonic() - started < 8
    assert result.code == (0 if outcome == "succeeded" else 2), result.err
    assert "could not announce the end in time; the result does not change" in result.err


def test_the_certificate_of_a_receiver_must_be_valid(corpus: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "receiver.pem")
    with receiving(certificate=certificate) as receiver:
        result = concatenate(corpus, url=receiver.url)
        assert result.code == 0 and receiver.requests == []
        assert "could not announce the end to 127.0.0.1: its certificate is not valid (self-signed certificate)" in (
            result.err
        )
        missing = concatenate(corpus, url=receiver.url, REQUESTS_CA_BUNDLE=str(tmp_path / "missing"))
        assert missing.code == 0 and f"REQUESTS_CA_BUNDLE names '{tmp_path / 'missing'}'" in missing.err
        trusted = concatenate(corpus, url=receiver.url, REQUESTS_CA_BUNDLE=f"{certificate}.crt")
        assert trusted.code == 0, trusted.err
    assert len(receiver.messages) == 1


def test_a_proxy_of_the_environment_is_used(corpus: Path) -> None:
    with receiving() as proxy:
        result = concatenate(
            corpus,
            url="http://receiver.invalid/path",
            http_proxy=f"http://127.0.0.1:{proxy.port}",
            NO_PROXY="",
            no_proxy="",
        )
        assert result.code == 0, result.err
    assert [request.path for request in proxy.requests] == ["http://receiver.invalid/path"]


@pytest.mark.parametrize(
    "url", ["ftp://example.org/x", "hooks.example.org/x", "http://", "http://host:port/x", "file:///etc/passwd"]
)
def test_an_invalid_url_is_only_a_warning(corpus: Path, url: str) -> None:
    result = concatenate(corpus, url=url)
    assert result.code == 0
    assert "warning: the URL in TOKENMILL_NOTIFY_URL is not an address such as https://HOST/PATH" in result.err
    assert url not in result.err


def test_a_missing_file_is_only_a_warning(corpus: Path, tmp_path: Path) -> None:
    result = concatenate(corpus, "--notify-url-file", tmp_path / "missing")
    assert result.code == 0 and "the end will not be announced" in result.err


def test_a_missing_secret_is_only_a_warning(corpus: Path) -> None:
    result = concatenate(corpus, TOKENMILL_NOTIFY_OBJECT="batch/v1/Job/corpus-concatenate")
    assert result.code == 0
    assert "TOKENMILL_NOTIFY_URL is empty (check notify.urlSecret of the chart); the end will not be" in result.err


def test_credentials_are_not_announced(corpus: Path) -> None:
    token = "hf_planted0123456789abcdef"
    with receiving() as receiver:
        result = tokenmill(
            *("extract", corpus / token, corpus.parent / "out"), TOKENMILL_NOTIFY_URL=receiver.url, HF_TOKEN=token
        )
    assert result.code == 2
    (message,) = receiver.messages
    assert token not in json.dumps(message) and "<redacted>" in message["message"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_is_json_without_markup_of_the_text(template: str) -> None:
    announcement = Announcement(
        outcome="failed", subject="extract", message="<!channel> & " + "x" * 5000, output="/data/out", exit_code=2
    )
    body = TEMPLATES[template](announcement)
    assert isinstance(json.loads(body), dict)
    assert len(body) < MAX_MESSAGE_CHARACTERS + 1000
    assert template != "slack" or b"<!channel>" not in body


def event_api(receiver: Receiver, directory: Path, certificate: Path) -> dict[str, str]:
    """Return the environment of a pod that may record Events."""
    directory.mkdir(exist_ok=True)
    (directory / "token").write_text("token-of-the-account\n")
    (directory / "ca.crt").write_bytes(Path(f"{certificate}.crt").read_bytes())
    return {
        "TOKENMILL_NOTIFY_API": str(directory),
        "TOKENMILL_NOTIFY_OBJECT": "batch/v1/Job/corpus-concatenate",
        "TOKENMILL_NAMESPACE": "team",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(receiver.port),
        "https_proxy": "http://127.0.0.1:1",
        "NO_PROXY": "",
    }


@pytest.mark.parametrize("can_read", [True, False], ids=["with-uid", "without-uid"])
def test_an_event_is_recorded_for_the_job(corpus: Path, tmp_path: Path, can_read: bool) -> None:
    certificate = make_certificate(tmp_path / "server.pem")
    server = Receiver(content=b'{"metadata": {"uid": "uid-of-the-job"}}')

    def answer(request: Request) -> tuple[int, dict[str, str]]:
        return (201 if request.method == "POST" else 200 if can_read else 403), {}

    server.answer = answer
    with receiving(server, certificate):
        result = concatenate(corpus, **event_api(server, tmp_path / "api", certificate))
    assert result.code == 0 and "warning" not in result.err, result.err
    read, created = server.requests
    assert read.path == "/apis/batch/v1/namespaces/team/jobs/corpus-concatenate"
    assert created.path == "/api/v1/namespaces/team/events"
    assert {read.headers["Authorization"], created.headers["Authorization"]} == {"Bearer token-of-the-account"}
    event = created.json
    expected = {"apiVersion": "batch/v1", "kind": "Job", "name": "corpus-concatenate", "namespace": "team"}
    assert event["involvedObject"] == expected | ({"uid": "uid-of-the-job"} if can_read else {})
    assert (event["type"], event["reason"]) == ("Normal", "Succeeded")
    assert event["message"].startswith("concatenate succeeded: concatenate: complete, 4 files")


def test_an_event_that_the_server_refuses_is_only_a_warning(corpus: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "server.pem")
    with receiving(Receiver(answer=statuses(403)), certificate) as server:
        result = concatenate(corpus, **event_api(server, tmp_path / "api", certificate))
    assert result.code == 0
    assert "could not record an Event of Kubernetes: the API server responded 403; the result does not" in result.err


def test_an_event_does_not_wait_for_the_webhook(corpus: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "server.pem")
    server, webhook = Receiver(answer=statuses(200, 201)), Receiver()

    def answer_after_the_event(_: Request) -> tuple[int, dict[str, str]]:
        server.wait(2)
        return 200, {}

    webhook.answer = answer_after_the_event
    with receiving(server, certificate), receiving(webhook):
        result = concatenate(corpus, url=webhook.url, **event_api(server, tmp_path / "api", certificate))
    assert result.code == 0 and "warning" not in result.err, result.err
    assert (len(server.messages), len(webhook.messages)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [(200, 503, 200, 201), (503, 429, 500, 500, 200, 201)], ids=["once", "twice"])
def test_an_event_is_recorded_after_errors_of_the_server(corpus: Path, tmp_path: Path, codes: tuple[int, ...]) -> None:
    certificate = make_certificate(tmp_path / "server.pem")
    with receiving(Receiver(answer=statuses(*codes)), certificate) as server:
        result = concatenate(corpus, **event_api(server, tmp_path / "api", certificate))
    assert result.code == 0 and "warning" not in result.err, result.err
    names = {event["metadata"]["name"] for event in server.messages}
    assert len(server.messages) == len(codes) // 2 and len(names) == 1
