"""charts/shared-storage: its NOTES about speed, uninstallation and harmful options."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.storage import GUIDE_BLOB, NEEDED
from support.storage_chart import CHART, render, template
from tokenmill.fit.storage import parse_storage


@pytest.fixture(scope="module")
def chart_with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the chart that renders its NOTES, which `helm template` omits."""
    chart = tmp_path_factory.mktemp("chart") / "shared-storage"
    shutil.copytree(CHART, chart)
    text = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/notes.yaml").write_text(
        '{{- define "notes" -}}' + text + '{{- end -}}\nnotes: {{ include "notes" . | toJson }}\n'
    )
    return chart


def notes(chart: Path, overlay: str, *arguments: str, **settings: Any) -> str:
    """Return the notes of an installation."""
    done = template(overlay, *arguments, chart=chart, **settings)
    assert done.returncode == 0, done.stderr
    return next(str(document["notes"]) for document in yaml.safe_load_all(done.stdout) if "notes" in document)


AMLFS_40 = {"amlfs.skuName": "AMLFS-Durable-Premium-40", "amlfs.storageCapacityTiB": 480}


HDD = {"fsx.deploymentType": "PERSISTENT_1", "fsx.storageType": "HDD", "fsx.driveCacheType": "READ"}
HDD |= {"fsx.perUnitStorageThroughput": 40, "fsx.storageCapacityGiB": 1800}


@pytest.mark.parametrize(
    ("overlay", "settings", "name"),
    [
        ("amlfs", {}, "amlfs-125:16"),
        ("amlfs", AMLFS_40, "amlfs-40:480"),
        ("amlfs", {"amlfs.skuName": "AMLFS-Durable-Premium-500", "amlfs.storageCapacityTiB": 4}, "amlfs-500:4"),
        ("amlfs-static", {"amlfs.skuName": "AMLFS-Durable-Premium-250"}, "amlfs-250:48"),
        ("fsx", {}, "fsx-250:4.6875"),
        ("fsx", {"fsx.perUnitStorageThroughput": 1000, "fsx.storageCapacityGiB": 24000}, "fsx-1000:23.4375"),
        ("fsx", {"fsx.deploymentType": "SCRATCH_2", "fsx.perUnitStorageThroughput": "null"}, "fsx-scratch:4.6875"),
        ("fsx", HDD, "fsx-40:1.7578125"),
        *(
            ("fsx-static", {"fsx.perUnitStorageThroughput": rate}, f"fsx-{rate}:2.34375")
            for rate in (12, 50, 100, 125, 200, 500)
        ),
        ("fsx-static", {"fsx.deploymentType": "SCRATCH_1", "fsx.perUnitStorageThroughput": 300}, "fsx-scratch:2.34375"),
        ("blob", {}, "blob"),
        ("blob-nfs", {}, "blob"),
    ],
)
def test_the_notes_contain_the_fit_command_for_the_storage(
    chart_with_notes: Path, overlay: str, settings: dict[str, Any], name: str
) -> None:
    text = notes(chart_with_notes, overlay, **settings)
    assert f"tokenmill fit --model NAME --gpus N --gpu-memory GIB --storage {name} --data TB" in text
    assert parse_storage(name).bytes_per_second, "the command does not accept the name in the notes"


@pytest.mark.parametrize(
    ("overlay", "settings"),
    [
        *((overlay, {}) for overlay in ("nfs", "local", "existing", "amlfs-static", "fsx-static")),
        *(("fsx-static", {"fsx.perUnitStorageThroughput": rate}) for rate in (1, 300, 2000)),
    ],
)
def test_an_unknown_speed_is_not_stated(chart_with_notes: Path, overlay: str, settings: dict[str, Any]) -> None:
    text = notes(chart_with_notes, overlay, **settings)
    assert "--storage" not in text and "--write-bandwidth GB/S --capacity TB" in text
    server = "the node's disk" if overlay == "local" else "its server"
    assert f"The speed depends on {server}." in text


@pytest.mark.parametrize("overlay", [*NEEDED])
def test_the_notes_state_what_an_uninstallation_keeps(chart_with_notes: Path, overlay: str) -> None:
    text = notes(chart_with_notes, overlay)
    kept = any("helm.sh/resource-policy" in item["metadata"].get("annotations", {}) for item in render(overlay))
    assert ("An uninstallation keeps the PVC and its data" in text) == kept
    assert ("An uninstallation deletes the PVC and its volume. It keeps the " in text) != kept


def warnings(text: str) -> list[str]:
    return [line.removeprefix("Warning: ") for line in text.splitlines() if line.startswith("Warning: ")]


def test_harmful_options_in_the_guide_s_line_are_reported(chart_with_notes: Path) -> None:
    stale, ignored, memory = warnings(notes(chart_with_notes, "blob", *GUIDE_BLOB))
    assert stale.startswith("a node caches the attributes of a file, also of a missing one, for up to 120 s ")
    assert "(attr_timeout; entry_timeout; negative_timeout; attr-cache-timeout, 120 by default)" in stale
    assert "read an old checkpoint tracker" in stale
    assert ignored.startswith("--file-cache-timeout-in-seconds has no effect with --block-cache")
    assert "outside the limits of pods: more than half of it, because --block-cache-pool-size is not set" in memory


FRESH = ["-o allow_other", "-o attr_timeout=0", "-o entry_timeout=0", "-o negative_timeout=0", "--attr-cache-timeout=0"]


ALL_FIVE = ["attr_timeout", "entry_timeout", "negative_timeout", "attr-cache-timeout", "file-cache-timeout"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([*FRESH, "--file-cache-timeout-in-seconds=0"], []),
        ([*FRESH, "--file-cache-timeout=0"], []),
        (["-o allow_other,direct_io"], []),
        (["--allow-other", "--disable-kernel-cache", "--use-attr-cache=false", "--file-cache-timeout=0"], []),
        (
            ["--allow-other", "--attr-timeout=0", "--entry-timeout=0", "--negative-timeout=0", *FRESH[-1:]],
            ["file-cache"],
        ),
        ([*FRESH, "--file-cache-timeout=30"], ["up to 30 s"]),
        (["-o allow_other"], ["; ".join(f"{name}, 120 by default" for name in ALL_FIVE)]),
        ([*FRESH[1:], "--file-cache-timeout=0"], ["without -o allow_other only root can read"]),
        ([*FRESH, "--block-cache", "--block-cache-pool-size=1024"], ["--block-cache-pool-size=1024. Checkpoints"]),
    ],
)
def test_blobfuse_s_options_are_checked_by_their_effect(
    chart_with_notes: Path, options: list[str], parts: list[str]
) -> None:
    lines = warnings(notes(chart_with_notes, "blob", "--set-json", f"storage.mountOptions={json.dumps(options)}"))
    assert len(lines) == len(parts), lines
    for line, part in zip(lines, parts, strict=True):
        assert part in line


def test_the_chart_s_own_options_cause_no_warnings(chart_with_notes: Path) -> None:
    for overlay in NEEDED:
        assert warnings(notes(chart_with_notes, overlay)) == []
    (line,) = warnings(notes(chart_with_notes, "blob", **{"blob.cache": "block"}))
    assert "--block-cache-pool-size=4096. Checkpoints" in line
    (line,) = warnings(notes(chart_with_notes, "blob", **{"blob.attributeTimeoutSeconds": 7}))
    assert "for up to 7 s" in line


def test_harmful_options_of_other_back_ends_are_reported(chart_with_notes: Path) -> None:
    sets = {"nfs.version": "", "nfs.nconnect": "null", "storage.mountOptions": "{soft}"}
    (line,) = warnings(notes(chart_with_notes, "nfs", **sets))
    assert line.startswith("with the mount option soft, a write fails")
    for overlay in ("amlfs", "fsx"):
        (line,) = warnings(notes(chart_with_notes, overlay, **{"storage.mountOptions": "{noatime}"}))
        assert line.startswith("without the mount option flock, file locks fail")
