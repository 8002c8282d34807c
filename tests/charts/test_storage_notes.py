"""charts/shared-storage: what its NOTES say of speed, of an uninstallation and of options that harm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.storage import GUIDE_BLOB, NEEDED
from support.storage_chart import CHART, render, template
from tokenmill.training.planner.storage import parse_storage


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the chart that renders its NOTES, which `helm template` leaves out."""
    chart = tmp_path_factory.mktemp("chart") / "shared-storage"
    shutil.copytree(CHART, chart)
    text = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/notes.yaml").write_text(
        '{{- define "notes" -}}' + text + '{{- end -}}\nnotes: {{ include "notes" . | toJson }}\n'
    )
    return chart


def notes(chart: Path, overlay: str, *words: str, **settings: Any) -> str:
    """Return what an installation says."""
    done = template(overlay, *words, chart=chart, **settings)
    assert done.returncode == 0, done.stderr
    return next(str(each["notes"]) for each in yaml.safe_load_all(done.stdout) if "notes" in each)


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
            ("fsx-static", {"fsx.perUnitStorageThroughput": each}, f"fsx-{each}:2.34375")
            for each in (12, 50, 100, 125, 200, 500)
        ),
        ("fsx-static", {"fsx.deploymentType": "SCRATCH_1", "fsx.perUnitStorageThroughput": 300}, "fsx-scratch:2.34375"),
        ("blob", {}, "blob"),
        ("blob-nfs", {}, "blob"),
    ],
)
def test_the_notes_name_the_command_that_fits_a_run_to_the_storage(
    talking: Path, overlay: str, settings: dict[str, Any], name: str
) -> None:
    said = notes(talking, overlay, **settings)
    assert f"tokenmill fit --model NAME --gpus N --gpu-memory GIB --storage {name} --data TB" in said
    assert parse_storage(name).bytes_per_second, "what the notes name is what the command takes"


@pytest.mark.parametrize(
    ("overlay", "settings"),
    [
        *((overlay, {}) for overlay in ("nfs", "local", "existing", "amlfs-static", "fsx-static")),
        *(("fsx-static", {"fsx.perUnitStorageThroughput": each}) for each in (1, 300, 2000)),
    ],
)
def test_what_is_not_known_of_a_speed_is_not_said(talking: Path, overlay: str, settings: dict[str, Any]) -> None:
    said = notes(talking, overlay, **settings)
    assert "--storage" not in said and "--write-bandwidth GB/S --capacity TB" in said
    server = "the node's disk" if overlay == "local" else "its server"
    assert f"How fast it is, {server} decides." in said


@pytest.mark.parametrize("overlay", [*NEEDED])
def test_what_an_uninstallation_leaves_is_said(talking: Path, overlay: str) -> None:
    said = notes(talking, overlay)
    kept = any("helm.sh/resource-policy" in each["metadata"].get("annotations", {}) for each in render(overlay))
    assert ("Uninstalling leaves the claim and its data" in said) == kept
    assert ("Uninstalling removes the claim and its volume; the " in said) != kept


def warnings(said: str) -> list[str]:
    return [line.removeprefix("Mind: ") for line in said.splitlines() if line.startswith("Mind: ")]


def test_what_harms_in_the_guide_s_line_is_said(talking: Path) -> None:
    stale, ignored, memory = warnings(notes(talking, "blob", *GUIDE_BLOB))
    assert stale.startswith("a node believes for up to 120 s what it knows of a file, that it is missing included ")
    assert "(attr_timeout; entry_timeout; negative_timeout; attr-cache-timeout, 120 when it is not given)" in stale
    assert "read an old checkpoint tracker" in stale
    assert ignored.startswith("--file-cache-timeout-in-seconds does nothing beside --block-cache")
    assert "outside the limits of pods: more than half of it, since --block-cache-pool-size is not given" in memory


FRESH = ["-o allow_other", "-o attr_timeout=0", "-o entry_timeout=0", "-o negative_timeout=0", "--attr-cache-timeout=0"]


ALL_FIVE = ["attr_timeout", "entry_timeout", "negative_timeout", "attr-cache-timeout", "file-cache-timeout"]


@pytest.mark.parametrize(
    ("options", "said"),
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
        (["-o allow_other"], ["; ".join(f"{name}, 120 when it is not given" for name in ALL_FIVE)]),
        ([*FRESH[1:], "--file-cache-timeout=0"], ["without -o allow_other only root reads"]),
        ([*FRESH, "--block-cache", "--block-cache-pool-size=1024"], ["--block-cache-pool-size=1024. Checkpoints"]),
    ],
)
def test_blobfuse_s_options_are_judged_by_what_they_do(talking: Path, options: list[str], said: list[str]) -> None:
    found = warnings(notes(talking, "blob", "--set-json", f"storage.mountOptions={json.dumps(options)}"))
    assert len(found) == len(said), found
    for line, part in zip(found, said, strict=True):
        assert part in line


def test_what_the_chart_makes_itself_harms_in_nothing(talking: Path) -> None:
    for overlay in NEEDED:
        assert warnings(notes(talking, overlay)) == []
    (line,) = warnings(notes(talking, "blob", **{"blob.cache": "block"}))
    assert "--block-cache-pool-size=4096. Checkpoints" in line
    (line,) = warnings(notes(talking, "blob", **{"blob.attributeTimeoutSeconds": 7}))
    assert "for up to 7 s" in line


def test_options_of_the_others_that_harm_are_said(talking: Path) -> None:
    sets = {"nfs.version": "", "nfs.nconnect": "null", "storage.mountOptions": "{soft}"}
    (line,) = warnings(notes(talking, "nfs", **sets))
    assert line.startswith("with the mount option soft, a write fails")
    for overlay in ("amlfs", "fsx"):
        (line,) = warnings(notes(talking, overlay, **{"storage.mountOptions": "{noatime}"}))
        assert line.startswith("without the mount option flock, locks of files fail")
