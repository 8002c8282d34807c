"""A stage that is added through the registry has plans, receipts, resume and lineage without changes in `engine`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from support import stages
from support.corpus import TOKENIZER
from tokenmill.cli.stage_result import report
from tokenmill.datasets.dataset import find_dataset, find_document, verify_outputs
from tokenmill.engine.contract import Files, InputRange, Part, StageKind
from tokenmill.engine.lineage import narrow
from tokenmill.engine.planning import Request
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.run import run_stage
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import find_upstream
from tokenmill.engine.status import list_statuses
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import InputError, RequestError
from tokenmill.records.suffixes import DATA_SUFFIXES
from tokenmill.stages import registry

UPPERCASE = StageKind("uppercase", Files)


@dataclass(frozen=True, kw_only=True)
class Uppercase(Stage):
    """Change each record to capitals; refuse records with the word `word`, and omit records with `skip`."""

    input: Path
    output: Path
    word: str = ""
    skip: str = ""

    kind: ClassVar = UPPERCASE
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per file."""
        earlier = registry.earlier_kinds(UPPERCASE)
        dataset = find_upstream(self.input, UPPERCASE.name, earlier, usable=DATA_SUFFIXES, output=self.output)
        request = {"input": dataset.upstream.to_json(), "word": self.word, "skip": self.skip}

        def make() -> Plan:
            units = [Unit(file.path, file.bytes, Files([file.input]), [file.path]) for file in dataset.files]
            return Plan(
                UPPERCASE.name,
                request,
                units,
                basis={"word": self.word, "skip": self.skip},
                source=dataset.source,
                upstream=dataset.upstream,
                require="out",
            )

        return Request(request, make, dataset.root, inputs=dataset.identities)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Write one file."""
        (file,) = unit.spec(Files).inputs
        output, records, dropped = workspace.open(unit.outputs[0]), 0, list[int]()
        with workspace.reading(file, unit.weight) as path, path.open() as lines:
            for line in lines:
                record = json.loads(line)
                if self.word and self.word in record["text"]:
                    raise InputError(f"{path}: it has the word {self.word!r}")
                if self.skip and self.skip in record["text"]:
                    dropped.append(records)
                else:
                    output.write(json.dumps({"text": record["text"].upper()}).encode() + b"\n")
                records += 1
        kept = records - len(dropped)
        output.describe(records=kept, blank=0, parts=narrow(file.parts or [], records, dropped))
        workspace.inputs = [InputRange(file.path, 0, records)]
        return {"in": records, "out": kept, "dropped": len(dropped)}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create two files, and register the stage between concatenate and preprocess."""
    before = registry.KINDS.index(registry.PREPROCESS)
    entry = registry.StageEntry(UPPERCASE, "uppercase", "see {path}")
    entries = (*registry.STAGES[:before], entry, *registry.STAGES[before:])
    monkeypatch.setattr(registry, "STAGES", entries)
    monkeypatch.setattr(registry, "KINDS", tuple(entry.kind for entry in entries))
    directory = tmp_path / "corpus"
    directory.mkdir()
    for name in ("a", "b"):
        (directory / f"{name}.jsonl").write_text(f'{{"text": "one {name}"}}\n{{"text": "two {name}"}}\n')
    return directory


def run(worker: int = 0, workers: int = 1, *, replace: bool = False) -> StageRun:
    return StageRun(Reporter(), worker, workers, processes=1, replace=replace)


@pytest.mark.slow
def test_a_new_stage_is_planned_resumed_and_chained(source: Path) -> None:
    stage = Uppercase(input=source, output=registry.default_output(source, UPPERCASE))
    assert run_stage(stage, run(0, 2)).completion.manifest is None
    assert [(status.stage, status.units_done) for status in list_statuses(source, registry.KINDS)] == [("uppercase", 1)]
    assert run_stage(stage, run()).done_before == 1
    assert run_stage(stage, run()).done_now == 0
    assert (stage.output / "a.jsonl").read_text() == '{"text": "ONE A"}\n{"text": "TWO A"}\n'

    stages.preprocess(source, source / "pairs", run(), tokenizer=str(TOKENIZER))
    assert verify_outputs(source / "pairs", registry.KINDS, full=True)[1] == []
    dataset = find_dataset(source / "pairs")
    assert dataset.manifest.upstream.maker == "uppercase"
    assert find_document(dataset, 3, key=None, prefix=None).source == ("b.jsonl", 1)


def test_a_new_stage_fails_and_is_replaced_like_others(source: Path) -> None:
    output = registry.default_output(source, UPPERCASE)
    with pytest.raises(InputError, match=r"b\.jsonl: it has the word 'two b'"):
        run_stage(Uppercase(input=source, output=output, word="two b"), run())
    assert [failure.unit for failure in list_statuses(source, registry.KINDS)[0].failures] == ["b.jsonl"]
    other = Uppercase(input=source, output=output, word="three")
    with pytest.raises(RequestError, match=r'word: "two b" -> "three"'):
        run_stage(other, run())
    assert run_stage(other, run(replace=True)).completion.manifest is not None


def test_records_that_a_new_stage_omits_are_counted(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage = Uppercase(input=source, output=registry.default_output(source, UPPERCASE), skip="one b")
    summary = run_stage(stage, run())
    report(summary, stage.output, json_lines=False)
    assert "3 records, 1 record left out" in capfd.readouterr().out
    assert (stage.output / "b.jsonl").read_text() == '{"text": "TWO B"}\n'
    assert summary.completion.manifest is not None
    assert [file.parts for file in summary.completion.manifest.files] == [
        [Part("a.jsonl", 0, 2)],
        [Part("b.jsonl", 1, 1)],
    ]
