"""Comparison of runs: what is read from the files of each program, which runs are comparable, and the numbers."""

import json
import math
import os
import struct
import subprocess
import sys
import time
import zlib
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from support.run_files import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    event,
    expected_rate,
    identity,
    is_close,
    loss_at,
    megatron_arguments,
    megatron_line,
    tf_record,
    write_events,
    write_jsonl_run,
    write_lightning_csv,
    write_trainer_state,
)
from tokenmill.core.json_lines import format_json, make_portable
from tokenmill.core.redaction import REDACTED
from tokenmill.errors import RequestError
from tokenmill.reports.compare.report import ComparisonReport, RunSummary, build_report, compare_runs
from tokenmill.reports.compare.run import ComparedRun, parse_inputs, read_run
from tokenmill.reports.compare.text import to_text

REAL_EVENTS = """
eNrzYICAf5M85nIu3uO8o/TQLUcp3qSixMw8Pdey1LwSK6MgPS6dktS84vyipPzEohS94tLc3MSiSr3yosyS1CK9VJCq+LTMnNR4
iEhR4X0/e6i5galliZwlRyDmaplwGXGJF6cWxuek5qWXZOiXpFaUxEONc+LlYBdiEWLiYHRiNjSy8OLgYuNiASlgnvukxgVqnHOk
3izO7zDjLLnMueTSc/KTEnPikxJLkjPiizOrUlFN5Yabyohkpl7g4lpZqJkJ+veVOQ8fhZgpwKglwMXHxZ6Tq5CTX1wsysCwwMH+
wHoXFahiJ+0GX07uY3DF4lyiXHwgTyeWZObn6ZZk5qYC9TTYWU7L+2AI1TO3ufklZwZCjwqXEhdnelFiim5eflGuEwcHoxYLA8MB
ey9uLk4u9uLkxJzEouLDrfnVKC5cCDOACdWFoaGhDr/3fxZDceFVhGJcLjwmIxeE4kKH43A9RLlQ4u8OCRQXlsMMYEYPQwUHmdtz
3FFceBShGJcLBRezobpQ4ARcD1EuNNru/VkOasDNO0JGnJvfQA2YhhbN/AvbbbkUraNUoapf7TH7zPkRSTUuNxb1rjYygmpSkQx7
wxnxFqGJKEfmzZodDQDnFQkI
"""
"""An event file that torch 2.15's SummaryWriter wrote with TensorBoard 2.20, compressed: lm loss, iteration-time and
grad-norm of the steps 1, 2, 3 and 150, and two texts. The gradient norms are tensors."""


def compare(*arguments: object) -> ComparisonReport:
    return compare_runs(parse_inputs([str(argument) for argument in arguments]))[0]


def read(path: Path, **options: int) -> ComparedRun:
    return read_run(parse_inputs([str(path)])[0], **options)


def summarize(path: Path) -> RunSummary:
    return build_report([read(path)]).runs[0]


# -- files of each program


def test_jsonl_of_the_examples(tmp_path: Path) -> None:
    run = summarize(write_jsonl_run(tmp_path / "run", range(1, 201), record=identity()))
    assert (run.steps, run.tokens, run.global_batch) == (200, 200 * GLOBAL_BATCH * SEQ_LENGTH, GLOBAL_BATCH)
    assert run.fingerprint == identity().fingerprint[:12]
    assert is_close(run.last_loss, loss_at(200), 0.05)
    assert is_close(run.tokens_per_second, expected_rate())
    assert is_close(run.data_wait, 0.01)
    assert is_close(run.wall_time, 100)
    assert (run.restarts, run.steps_trained_twice, run.bad_losses, run.stalls, run.notes) == (0, 0, 0, 0, [])


def test_lines_that_differ_are_read_like_equal_lines(tmp_path: Path) -> None:
    equal = read(write_jsonl_run(tmp_path / "equal", range(1, 5001))).series
    lines = (tmp_path / "equal/metrics.jsonl").read_text().splitlines()
    lines[10:10] = lines[3000:3000] = ["", '{"other": 1}']
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/metrics.jsonl").write_text("\n".join(lines))
    mixed = read(tmp_path / "mixed").series
    for name in ("steps", "tokens", "loss", "seconds", "data_wait", "rate", "digests"):
        assert list(getattr(equal, name)) == list(getattr(mixed, name)), name


def test_log_of_megatron(tmp_path: Path) -> None:
    lines = [megatron_line(step, clock=step // 2) for step in range(10, 1001, 10)]
    lines.insert(3, "    batch-generator ................................: (10.00, 25.00)")
    text = "\n".join([megatron_arguments(seed=7, lr=1e-4), "some other output | with bars: 3 |", *lines])
    (tmp_path / "train.log").write_text(text)
    run = read(tmp_path)
    assert (run.seq_length, run.global_batch, run.world_size) == (SEQ_LENGTH, GLOBAL_BATCH, 4)
    assert run.settings["lr"] == "0.0001"
    summary = build_report([run]).runs[0]
    assert (summary.steps, summary.tokens) == (1000, 1000 * GLOBAL_BATCH * SEQ_LENGTH)
    assert is_close(summary.tokens_per_second, expected_rate())
    assert is_close(summary.tokens_per_second_per_gpu, expected_rate() / 4)
    assert summary.step_seconds == 0.5
    assert is_close(summary.max_grad_norm, 1.1)
    assert run.series.data_wait[2] == 0.025


def test_log_of_the_trainer_of_the_recovery_tests(tmp_path: Path) -> None:
    trainer = Path(__file__).parents[1] / "trainer/trainer.py"
    options = ["--save", tmp_path / "checkpoints", "--log-interval", 1, "--save-interval", 5]
    options += ["--global-batch-size", 8, "--lr", 0.001, "--train-iters", 12]
    environment = os.environ | {"TRAINER_STEP_SECONDS": "0.001", "RANK": "0", "WORLD_SIZE": "1"}
    output = subprocess.run(
        [sys.executable, trainer, *map(str, options)], env=environment, capture_output=True, check=True
    )
    (tmp_path / "train.log").write_bytes(output.stdout)
    run = read(tmp_path, seq_length=SEQ_LENGTH)
    assert run.series.steps.tolist() == [*range(1, 13)]
    assert run.series.loss[9] == 1.0
    assert run.series.tokens[-1] == 12 * 8 * SEQ_LENGTH


def test_event_file_of_tensorboard(tmp_path: Path) -> None:
    path = tmp_path / "tb" / "events.out.tfevents.1795806804.vm.15760.0"
    path.parent.mkdir()
    path.write_bytes(zlib.decompress(b64decode(REAL_EVENTS)))
    run = read(tmp_path)
    assert run.series.steps.tolist() == [1, 2, 3, 150]
    assert run.series.loss.round(3).tolist() == [5.0, 3.333, 2.5, 0.066]
    assert run.series.seconds.tolist() == [0.25] * 4
    assert run.series.grad_norm.tolist() == [1.5] * 4
    assert (run.seq_length, run.global_batch, run.series.tokens[-1]) == (128, 8, 150 * 8 * 128)
    assert run.notes == []


@pytest.mark.parametrize(
    ("tags", "wait"),
    [
        ({"lm loss": 0, "iteration-time": 0.5, "batch-size": 8.0}, math.nan),
        (
            {"loss_metrics/global_avg_loss": 0, "time_metrics/end_to_end(s)": 0.5, "time_metrics/data_loading(%)": 4},
            0.02,
        ),
        ({"train/loss": 0, "train/learning_rate": 1e-4, "train/train_loss": 99}, math.nan),
        ({"train_loss": 0, "epoch": 0}, math.nan),
    ],
    ids=["Megatron-LM", "torchtitan", "Hugging Face", "Lightning"],
)
def test_tags_of_event_files(tmp_path: Path, tags: dict[str, float], wait: float) -> None:
    events = [
        (tag, step, loss_at(step) if value == 0 else value)
        for step in (*range(0, 300, 10), 70000)
        for tag, value in tags.items()
    ]
    write_events(tmp_path / "events.out.tfevents.1.host", events)
    series = read(tmp_path).series
    assert series.steps[:2].tolist() == [0, 10] and series.steps[-1] == 70000
    assert series.loss[1] == pytest.approx(loss_at(10))
    assert series.data_wait[2] == pytest.approx(wait, nan_ok=True)
    assert is_close(series.seconds[2], 0.5 if "train" not in "".join(tags) else 1.0)


def test_samples_of_megatrons_events(tmp_path: Path) -> None:
    events = [("seq_length/text_summary", 0, "128")]
    for step in range(1, 20):
        events += [("lm loss", step, 3.0), ("lm loss vs samples", 16 * step, 3.0)]
    write_events(tmp_path / "events.out.tfevents.1.host", events)
    run = read(tmp_path)
    assert (run.global_batch, run.series.tokens[-1]) == (16, 19 * 16 * 128)


def test_trainer_state(tmp_path: Path) -> None:
    for checkpoint in (50, 100):
        write_trainer_state(tmp_path / f"checkpoint-{checkpoint}", checkpoint)
    run = read(tmp_path)
    assert run.series.steps.tolist() == [*range(10, 101, 10)]
    assert run.series.loss[-1] == loss_at(100), "the mean of the complete run is not the loss of its last step"
    assert run.series.tokens[-1] == 100 * GLOBAL_BATCH * SEQ_LENGTH
    assert run.series.seconds[1:].tolist() == [0.5] * 9
    assert "checkpoint-100" in run.sources[0]


def test_csv_of_lightning(tmp_path: Path) -> None:
    write_lightning_csv(tmp_path / "version_0/metrics.csv")
    (tmp_path / "version_0/hparams.yaml").write_text("seq_length: 128\noptimizer:\n  lr: 0.1\n")
    run = read(tmp_path)
    assert run.series.steps.tolist() == [*range(9, 100, 10)]
    assert run.series.loss[-1] == loss_at(99)
    assert run.settings["optimizer.lr"] == "0.1"


def test_form_with_the_most_losses_gives_the_steps(tmp_path: Path) -> None:
    write_events(tmp_path / "tb/events.out.tfevents.1.host", [("lm loss", step, 3.0) for step in range(1, 101)])
    lines = [megatron_line(step, clock=step) for step in range(10, 101, 10)]
    (tmp_path / "run.log").write_text("\n".join([megatron_arguments(), *lines]))
    series = read(tmp_path).series
    assert len(series.steps) == 100
    assert series.tokens[-1] == 100 * GLOBAL_BATCH * SEQ_LENGTH
    assert is_close(series.grad_norm[19], 1.05)


# -- restarts, gaps, stalls, bad losses


def test_steps_of_the_later_attempt_count(tmp_path: Path) -> None:
    first = [megatron_line(step, clock=step) for step in range(10, 151, 10)]
    second = [megatron_line(step, clock=step + 400, loss=1.0) for step in range(110, 131, 10)]
    (tmp_path / "a.log").write_text("\n".join([megatron_arguments(), *first]))
    (tmp_path / "b.log").write_text("\n".join(second))
    run = read(tmp_path)
    assert run.series.steps.tolist() == [*range(10, 131, 10)]
    assert run.series.loss[-3:].tolist() == [1.0, 1.0, 1.0]
    summary = build_report([run]).runs[0]
    assert (summary.restarts, summary.steps_trained_twice) == (1, 50)
    assert summary.gap_seconds == 510 - 5 - 150


def test_copies_of_a_log_count_once(tmp_path: Path) -> None:
    text = "\n".join([megatron_arguments(), *(megatron_line(step, clock=step) for step in range(1, 51))])
    (tmp_path / "a.log").write_text(text)
    (tmp_path / "b.log").write_text(text)
    run = summarize(tmp_path)
    assert (run.steps, run.restarts, run.steps_trained_twice) == (50, 0, 0)


def test_stalls_and_bad_losses(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path, seconds=lambda step: 10.5 if step in (100, 150) else 0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "loss": NaN}\n{"step": 202, "loss": null}\n{"step": 203, "loss": Infinity}\n')
    run = summarize(tmp_path)
    assert (run.stalls, run.stall_seconds, run.bad_losses, run.steps) == (2, 20.0, 3, 203)
    lines = [megatron_line(step, nan=step == 5, skipped=step == 6) for step in range(1, 20)]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x.log").write_text("\n".join(lines))
    run = summarize(tmp_path / "other")
    assert (run.bad_losses, run.skipped_iterations) == (1, 1)


def test_several_runs_in_a_directory_are_refused(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path / "a")
    write_jsonl_run(tmp_path / "b", seed=1)
    with pytest.raises(RequestError, match="contains several runs"):
        read(tmp_path)


# -- which runs are comparable


def state(first: Path, second: Path) -> tuple[str, str]:
    verdict = compare(first, second).verdicts[0]
    return verdict.state, "; ".join(verdict.reasons)


def test_runs_with_one_fingerprint_are_comparable(tmp_path: Path) -> None:
    first = write_jsonl_run(tmp_path / "a", record=identity())
    second = write_jsonl_run(tmp_path / "b", range(1, 101), record=identity(), seed=3)
    report = compare(first, second)
    assert report.headline == "comparable with a: b"
    assert report.verdicts[0].evidence.endswith("equal samples in 100 steps")
    assert report.runs[1].common == 100 * GLOBAL_BATCH * SEQ_LENGTH
    assert report.marks[-1].position == report.runs[1].common
    assert report.runs[0].difference == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 7}, "the seed was 1234, and is 7 now"),
        ({"seq_length": 256}, "seq_length was 128, and is 256 now"),
        ({"split": "1,0,0"}, "the split was 99,1,0, and is 1,0,0 now"),
        ({"kind": "synthetic"}, "random numbers"),
    ],
)
def test_other_data_is_not_comparable(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    first = write_jsonl_run(tmp_path / "a", record=identity())
    second = write_jsonl_run(tmp_path / "b", record=identity(**changes))
    verdict, reasons = state(first, second)
    assert verdict == "not comparable"
    assert reason in reasons
    assert to_text(compare(first, second)).startswith("NOT comparable with a: b")


def test_another_batch_or_order_is_not_comparable(tmp_path: Path) -> None:
    first = write_jsonl_run(tmp_path / "a", record=identity())
    batch = write_jsonl_run(tmp_path / "b", record=identity(), global_batch=16)
    assert state(first, batch) == ("not comparable", "the global batch was 8, and is 16 now")
    order = write_jsonl_run(tmp_path / "c", record=identity(), digest=lambda step: f"{step + (step > 42):x}".zfill(32))
    assert state(first, order)[1] == "the samples differ from step 43 on (the digests of the steps)"


def test_run_without_record_is_unknown(tmp_path: Path) -> None:
    first = write_jsonl_run(tmp_path / "a", record=identity())
    second = write_jsonl_run(tmp_path / "b")
    verdict, reasons = state(first, second)
    assert verdict == "unknown"
    assert "b has no record of its data: write tokenmill-data.json" in reasons
    assert compare(first, second).headline == "unknown whether comparable with a: b"


def test_known_difference_needs_no_record(tmp_path: Path) -> None:
    for name, batch in (("a", 8), ("b", 16)):
        (tmp_path / name).mkdir()
        lines = [megatron_arguments(global_batch_size=batch), megatron_line(1), megatron_line(2)]
        (tmp_path / name / "x.log").write_text("\n".join(lines))
    assert state(tmp_path / "a", tmp_path / "b")[0] == "not comparable"


def test_record_that_two_files_share_proves_nothing(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path, record=identity())
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (tmp_path / "other.jsonl", tmp_path / "link/other.jsonl"):
        verdict, reasons = state(tmp_path / "metrics.jsonl", other)
        assert verdict == "unknown"
        assert "give each run its own directory" in reasons


def write_training_identity(checkpoints: Path, seed: int = 1234) -> None:
    """Write identity.json as `tokenmill train` does."""
    part = {"path": "/elsewhere/corpus_text_document", "content": "a" * 32, "tokens": 10**6, "share": 1.0}
    value = {"lists": {"all": [part]}, "split": "99,1,0", "sequence_length": SEQ_LENGTH, "seed": seed}
    value |= {"tokenizer": "b" * 32, "tokenizer_name": "gpt2", "arguments": []}
    directory = checkpoints / ".tokenmill/train"
    directory.mkdir(parents=True)
    history = {"events": [{"iteration": 0, "time": 1.0, "identity": value, "adopted": False}], "format": 1}
    (directory / "identity.json").write_text(json.dumps(history))


def test_identity_of_tokenmill_train(tmp_path: Path) -> None:
    runs = {"a": 1234, "b": 1234, "c": 7}
    for name, seed in runs.items():
        write_training_identity(tmp_path / name, seed)
        lines = [megatron_arguments(train_iters=1000), *(megatron_line(step) for step in range(1, 9))]
        (tmp_path / name / "train.log").write_text("\n".join(lines))
    assert state(tmp_path / "a", tmp_path / "b")[0] == "comparable"
    assert state(tmp_path / "a", tmp_path / "c") == ("not comparable", "the seed was 1234, and is 7 now")
    loader = write_jsonl_run(tmp_path / "d", record=identity(samples=8000))
    assert state(tmp_path / "a", loader) == ("comparable", "")
    loader = write_jsonl_run(tmp_path / "e", record=identity(samples=9000))
    assert "the number of requested samples was 8000, and is 9000 now" in state(tmp_path / "a", loader)[1]


def test_data_that_changed_during_a_run_is_not_called_comparable(tmp_path: Path) -> None:
    histories = {"a": [(0, 1)], "changed": [(0, 2), (5, 1)], "set_back": [(0, 1), (5, 2), (3, 1)]}
    for name, events in histories.items():
        write_training_identity(tmp_path / name)
        path = tmp_path / name / ".tokenmill/train/identity.json"
        (event,) = json.loads(path.read_text())["events"]
        changed = [
            event | {"iteration": iteration, "identity": event["identity"] | {"seed": seed}}
            for iteration, seed in events
        ]
        path.write_text(json.dumps({"events": changed, "format": 1}))
        lines = [megatron_arguments(train_iters=1000), *(megatron_line(step) for step in range(1, 9))]
        (tmp_path / name / "train.log").write_text("\n".join(lines))
    verdict, reasons = state(tmp_path / "a", tmp_path / "changed")
    assert verdict == "unknown" and "its data was changed at iteration 5" in reasons
    assert state(tmp_path / "a", tmp_path / "set_back")[0] == "comparable"


def test_steps_with_another_batch_than_recorded(tmp_path: Path) -> None:
    first = write_jsonl_run(tmp_path / "a", record=identity())
    second = write_jsonl_run(tmp_path / "b", global_batch=2 * GLOBAL_BATCH)
    (second / "tokenmill-data.json").write_bytes((first / "tokenmill-data.json").read_bytes())
    verdict, reasons = state(first, second)
    assert verdict == "not comparable" and f"a step had {GLOBAL_BATCH} samples, and has 16 now" in reasons


def test_changed_record_is_refused(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path, record=identity())
    record = tmp_path / "tokenmill-data.json"
    record.write_text(record.read_text().replace("1234", "1235"))
    with pytest.raises(RequestError, match="was changed"):
        read(tmp_path)


def test_synthetic_mark_of_a_row(tmp_path: Path) -> None:
    run = summarize(write_jsonl_run(tmp_path / "run", synthetic=True))
    assert run.name == "run [SYNTHETIC]"
    assert "SYNTHETIC data" in to_text(compare(tmp_path / "run"))


# -- settings


def test_only_different_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        write_jsonl_run(tmp_path / name, record=identity())
        settings = {"lr": rate, "layers": 12, "hub_token": f"hf_abcdefghij{rate}", "pad_token": "<|endoftext|>"}
        settings |= {"nested": {"url": f"https://user:passw0rd{name}@example.org/{name}"}}
        (tmp_path / name / "args.json").write_text(json.dumps(settings))
    report = compare(tmp_path / "a", tmp_path / "b")
    differences = {setting.name: setting.values for setting in report.settings}
    assert differences["lr"] == ["0.1", "0.2"]
    assert "layers" not in differences and "pad_token" not in differences
    assert "abcdefghij" not in str(report) and "passw0rd" not in str(report)
    assert REDACTED in differences["nested.url"][0]


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path)
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.system ['false']\n")
    (tmp_path / "config.json").write_text("[" * 100_000)
    run = read(tmp_path)
    assert any("config.yaml is left out" in note for note in run.notes)


@pytest.mark.parametrize(
    "text",
    [
        "a: 0x" + "f" * 6000,
        "l0: &l0 {}\n"
        + "".join(f"l{n}: &l{n} {{{', '.join(f'{k}: *l{n - 1}' for k in 'abcdefgh')}}}\n" for n in range(1, 12)),
        "l0: &l0 {a: 1}\n" + "".join(f"l{n}: &l{n}\n  <<: [{', '.join([f'*l{n - 1}'] * 8)}]\n" for n in range(1, 12)),
        "a: [" + "1, " * 200_000 + "1]",
    ],
    ids=["digits", "aliases", "merges", "size"],
)
def test_yaml_that_fills_the_memory(tmp_path: Path, text: str) -> None:
    write_jsonl_run(tmp_path, range(1, 3))
    (tmp_path / "config.yaml").write_text(text)
    started = time.process_time()
    assert len(read(tmp_path).series.steps) == 2
    assert time.process_time() - started < 3


# -- hostile and incomplete files


def test_run_without_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(RequestError, match=r"has no steps with a loss .* specify a directory"):
            read(path)
    with pytest.raises(RequestError, match="No such file"):
        read(tmp_path / "missing")


def test_live_and_damaged_event_files(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.out.tfevents.1.h", [("lm loss", step, 3.0) for step in range(1, 101)])
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    run = read(path)
    assert len(run.series.steps) == 99
    assert "incomplete and left out" in run.notes[0]
    size = len(event("lm loss", 1, 3.0, 0.0))
    offset = len(data) - 50 * size
    for position in (offset + 20, offset):  # the record's content, and its length
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        run = read(path)
        assert len(run.series.steps) == 50
        assert f"is damaged at byte {offset:,}" in run.notes[0]
    path.write_bytes(data + bytes(10_000))
    assert len(read(path).series.steps) == 100


def test_event_file_with_odd_records(tmp_path: Path) -> None:
    odd = [b"", b"\x09", b"\x2a\xff\xff\xff\xff\x0f", os.urandom(300), b"\x2a\x02\x0a\x00", bytes(5000)]
    odd.append(b"\x09" + struct.pack("<d", 1.0) + b"\x10" + b"\xff" * 9 + b"\x01" + b"\x2a\x00")
    path = write_events(tmp_path / "events.out.tfevents.1.h", [("lm loss", 1, math.inf), ("lm loss", 2, 3.0)])
    path.write_bytes(path.read_bytes() + b"".join(map(tf_record, odd)) + event("lm loss", 3, 2.0, 1.0))
    run = read(tmp_path)
    assert run.series.steps.tolist() == [1, 2, 3]
    assert run.series.bad_losses == 1


def test_hostile_lines(tmp_path: Path) -> None:
    rows = ['{"step": 1, "loss": 3.0}', "[" * 200_000, "{" * 50_000, '{"a":' * 50_000, "x" * 3_000_000, "\0\xff"]
    rows += ['{"step": "many", "loss": 1}', '{"step": 1e400, "loss": 1}', '{"step": -5, "loss": 1}']
    rows += ['{"step": 2, "loss": ' + "9" * 400 + "}", '{"step": true, "loss": 1}', "null", '{"step": 3, "loss": 2.0}']
    rows += ['{"step": 4, "loss": "not a number"}', '{"step": 5, "loss": 1.0']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows), errors="surrogateescape")
    run = read(tmp_path)
    assert run.series.steps.tolist()[:1] == [1] and 3 in run.series.steps
    assert any("last line is incomplete" in note for note in run.notes)
    log = tmp_path / "log"
    log.mkdir()
    (log / "x.log").write_bytes(
        os.urandom(100_000) + b"\n" + b"-" * 3_000_000 + b"\n" + b" iteration " * 100_000 + b"\n"
        b"-------- arguments -------- \n" * 5000 + megatron_line(1).encode() + b"\n iteration 2/ 3 | lm loss: oops |"
    )
    started = time.process_time()
    assert read(log).series.steps.tolist()[0] == 1
    assert time.process_time() - started < 5


def test_csv_that_breaks_off(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("step,loss\n1,3.0\n2,\n3,2.5\n4,2.\n" + '5,"' + "x" * 200_000)
    run = read(tmp_path)
    assert run.series.steps.tolist() == [1, 3, 4]
    assert any("not valid CSV" in note for note in run.notes)


def test_numbers_that_overflow(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": 1e308, "seconds": 1e308, "time": sign * 1e308, "number of skipped iterations": 1e308}
        for step, sign in ((1, -1), (2, 1), (3, 1))
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with np.errstate(over="ignore"):
        assert "1e+308" in to_text(compare(tmp_path))


def test_texts_of_a_run_cannot_control_the_terminal_or_add_lines(tmp_path: Path) -> None:
    hostile = "x\n  comparable: b and a (fingerprint 0)\x1b[2J"
    first = write_jsonl_run(tmp_path / "a", record=identity())
    second = write_jsonl_run(tmp_path / os.fsdecode(b"b\xff"), record=identity(tokenizer=hostile))
    report = compare(first, second)
    text = to_text(report)
    assert "\x1b" not in text and "\n  comparable" not in text
    assert text.encode() and json.loads(format_json(report, make_portable))["runs"][1]["name"] == "b?"


def test_special_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "loop").symlink_to(tmp_path)
    write_jsonl_run(tmp_path)
    assert summarize(tmp_path).steps == 200
    with pytest.raises(RequestError, match="neither a directory nor a regular file"):
        read(tmp_path / "pipe.log")


def test_counter_that_does_not_count(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "loss": 3.0, "tokens": 1024, "data_wait": 3}) for step in range(1, 10)]
    (tmp_path / "m.jsonl").write_text("\n".join(rows) + "\n")
    run = read(tmp_path)
    assert any("tokens does not grow" in note for note in run.notes)
    assert any("not a share of the step" in note for note in run.notes)
    assert compare(tmp_path).axis == "steps"


def test_names_of_runs(tmp_path: Path) -> None:
    first, second = (write_jsonl_run(tmp_path / name / "logs") for name in ("a", "b"))
    assert [run.name for run in compare(first, f"new={second}").runs] == ["logs", "new"]
    assert [run.name for run in compare(first, second).runs] == ["a/logs", "b/logs"]
    with pytest.raises(RequestError, match="two runs have the name"):
        compare(f"x={first}", f"x={second}")


@pytest.mark.slow
def test_a_million_steps(tmp_path: Path) -> None:
    lines = (f'{{"step": {step}, "loss": {3 + 1 / step:.4f}, "tokens": {step * 1024}}}' for step in range(1, 1_000_001))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    started = time.process_time()
    assert summarize(tmp_path).steps == 1_000_000
    assert time.process_time() - started < 30


def test_the_step_of_the_largest_spike_is_named(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path / "run", range(1, 201))
    assert summarize(tmp_path / "run").spike_step is None
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row["loss"] *= {3: 9.0, 120: 3.0, 150: 1.5}.get(row["step"], 1.0)  # a spike of the warm-up does not count
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    assert summarize(tmp_path / "run").spike_step == 120
