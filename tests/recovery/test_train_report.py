"""`tokenmill report` about a run of the small trainer: attempts, checkpoints, loss and throughput."""

import json
from collections.abc import Callable
from pathlib import Path

from support.commandline import run_in_process, tokenmill
from support.train import ITERATIONS, Job, kill_with_ranks, wait_for

TOKEN = "hf_plantedQwZxkTyRbNmVcLsDgHjPfA"


def test_report_of_a_run_that_was_killed_once(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(step=0.03)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration      10")
    kill_with_ranks(run, node)
    code, log = run.once()
    assert code == 0, log

    ended = run_in_process("report", run.checkpoints, "--json")
    assert ended.code == 0, ended.err
    without_log = ended.result
    assert without_log["kind"] == "run" and without_log["summary"]["steps"] == ITERATIONS, "from the run's curve"
    curve = run.checkpoints / ".tokenmill/train/curve.jsonl"
    curve.rename(tmp_path / "moved")
    without_curve = run_in_process("report", run.checkpoints, "--json").result
    assert without_curve["summary"] is None and "--metrics" in without_curve["notes"][0]
    (tmp_path / "moved").rename(curve)

    log_file = run.directory / "log-0"
    records = run.checkpoints / ".tokenmill/train/attempts.json"
    attempts = json.loads(records.read_text())
    attempts[0]["ended"] = f"RuntimeError: refused {TOKEN}"
    records.write_text(json.dumps(attempts))
    command = ["report", run.checkpoints, "--metrics", log_file]
    ended = tokenmill(*command, "--json", HF_TOKEN=TOKEN)
    assert ended.code == 0, ended.err
    result = ended.result
    assert [attempt["start_iteration"] for attempt in result["attempts"]] == [entry["began_at"] for entry in attempts]
    assert result["attempts"][0]["start_iteration"] == 0 and len(result["attempts"]) == 2
    assert result["verdict"] == f"completed at iteration {ITERATIONS}"
    names = sorted(path.name for path in run.checkpoints.glob("iter_*"))
    assert [saved["name"] for saved in result["checkpoints"]] == names
    tracked = int((run.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert [saved["iteration"] for saved in result["checkpoints"] if saved["is_tracked"]] == [tracked]
    assert {saved["state"] for saved in result["checkpoints"]} == {"complete"}
    assert result["summary"]["steps"] == ITERATIONS
    settings = run.settings["model"]["seqLength"], run.settings["training"]["globalBatchSize"]
    assert (result["summary"]["sequence_length"], result["summary"]["global_batch"]) == settings
    assert (result["axis"], result["summary"]["tokens"]) == ("tokens", ITERATIONS * settings[0] * settings[1])
    assert result["plots"]["loss"]["raw"]["steps"][-1] == ITERATIONS

    bare = tmp_path / "bare.csv"
    bare.write_text("step,loss\n" + "".join(f"{step},{2 / step}\n" for step in range(1, ITERATIONS + 1)))
    assert run_in_process("report", run.checkpoints, "--metrics", bare, "--json").result["summary"]["tokens"] == (
        ITERATIONS * settings[0] * settings[1]
    ), "the records of the run have its batch, too"

    page = tmp_path / "run.html"
    assert tokenmill(*command, "--html", page, HF_TOKEN=TOKEN).code == 0
    text = tokenmill(*command, HF_TOKEN=TOKEN).out
    assert f"completed at iteration {ITERATIONS}." in text
    for content in (page.read_text(), text, ended.out):
        assert "RuntimeError: refused" in content and TOKEN not in content
    assert 'data-kind="loss"' in page.read_text()

    spread = [attempts[0] | {"id": str(number), "started": 1e9 + number * 6 * 3600} for number in range(3)]
    records.write_text(json.dumps(spread))
    notes = run_in_process("report", run.checkpoints, "--json").result["notes"]
    assert any("every 6.0 h on average: tokenmill fit --mtbf-run 6.0h computes" in note for note in notes)
