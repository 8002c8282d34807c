"""charts/shared-storage on a real cluster: accepted objects, and the effects of upgrades and uninstallations.

There is no cloud, so a dynamic claim waits for its driver. The tests mount and write a directory of the node and an NFS
export. TOKENMILL_E2E_NFS specifies the export as SERVER:/DIRECTORY; the node must be able to mount it, and every user
to write it. tests/e2e/nfs has a server, and a mount helper for nodes whose kernel has no NFS client.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster import CONFINED, IMAGE, RESTRICTED, Account, Namespace, node_name, wait_for
from support.storage import GUIDE_AMLFS, GUIDE_BLOB, NEEDED

pytestmark = pytest.mark.e2e

CHART = "charts/shared-storage"
DYNAMIC = ["amlfs", "blob", "blob-nfs", "fsx"]
STATIC = ["amlfs-static", "blob-static", "fsx-static", "nfs"]
CHANGED = {"amlfs": "amlfs.zone=2", "blob": "blob.skuName=Premium_ZRS", "blob-nfs": "blob.skuName=Premium_ZRS"}
CHANGED |= {"fsx": "fsx.perUnitStorageThroughput=500"}
OTHER_SIZE = {"amlfs-static": "amlfs.storageCapacityTiB=96", "blob-static": "pvc.size=9Ti", "nfs": "pvc.size=9Ti"}
OTHER_SIZE |= {"fsx-static": "fsx.storageCapacityGiB=4800"}


def line(overlay: str, *options: str) -> str:
    """Return the arguments of `helm install RELEASE`: the overlay, the values it requires, and a claim of its name."""
    needed = "".join(f" --set '{key}={value}'" for key, value in NEEDED[overlay].items())
    return f"{CHART} -f values/storage/{overlay}.yaml --set pvc.name={overlay}{needed} {' '.join(options)}"


@contextmanager
def installed(admin: Account, release: str, options: str) -> Iterator[str]:
    """Install a release, yield the notes of the installation, and uninstall the release."""
    try:
        yield admin.check(f"helm install {release} {options}")
    finally:
        admin.run(f"helm uninstall {release} --wait --timeout 9m", timeout=600)


def claim(admin: Account, name: str) -> Any:
    """Return a claim."""
    return admin.get(f"pvc {name}")


@pytest.mark.parametrize("overlay", DYNAMIC)
def test_a_dynamic_claim_outlives_its_release_and_is_reused(namespace: Namespace, overlay: str) -> None:
    admin, release = namespace.admin, f"storage-{overlay}"
    name = f"{namespace.name}.{release}"
    with installed(admin, release, line(overlay)) as notes:
        assert "An uninstallation keeps the PVC and its data" in notes
        storage_class, first = admin.get(f"storageclass {name}"), claim(admin, overlay)
        assert (storage_class["reclaimPolicy"], first["spec"]["storageClassName"]) == ("Retain", name)
        admin.check(f"helm upgrade {release} {line(overlay)}")
        assert claim(admin, overlay)["metadata"]["uid"] == first["metadata"]["uid"]
        assert admin.get(f"storageclass {name}")["metadata"]["uid"] == storage_class["metadata"]["uid"]
        ended = admin.run(f"helm upgrade {release} {line(overlay, '--set', CHANGED[overlay])}")
        assert ended.code != 0 and f'the StorageClass "{name}" exists with' in ended.err
        ended = admin.run(f"helm upgrade {release} {line(overlay, '--set', 'pvc.accessModes={ReadWriteOnce}')}")
        assert ended.code != 0 and f'the PVC "{overlay}" exists with pvc.accessModes' in ended.err
    assert admin.run(f"kubectl get storageclass {name}").code != 0
    with installed(admin, release, line(overlay)):
        assert claim(admin, overlay)["metadata"]["uid"] == first["metadata"]["uid"]
    admin.check(f"kubectl delete pvc {overlay} --timeout=60s")


def test_a_kept_claim_of_another_back_end_is_refused(namespace: Namespace) -> None:
    admin = namespace.admin
    first_values, other = (
        line(overlay).replace(f"pvc.name={overlay}", "pvc.name=kept") for overlay in ("amlfs", "blob")
    )
    with installed(admin, "kept", first_values):
        ended = admin.run(f"helm upgrade kept {other}")
        assert ended.code and "azurelustre.csi.azure.com (amlfs), but backend=blob has blob.csi" in ended.err, ended.err
    first = claim(admin, "kept")["metadata"]["uid"]
    for program in ("helm", "helm4"):
        ended = admin.run(f"{program} install kept {other}")
        assert ended.code and 'the PVC "kept" has the driver azurelustre.csi.azure.com (amlfs)' in ended.err
        assert "backend=blob has blob.csi.azure.com" in ended.err
    ended = admin.run(f"helm install kept {first_values} --set amlfs.zone=3")
    assert ended.code and 'zone="1", which cannot be changed to "3"' in ended.err, ended.err
    with installed(admin, "kept", first_values):
        assert claim(admin, "kept")["metadata"]["uid"] == first
    admin.check("kubectl delete pvc kept --timeout=60s")


def quote(arguments: tuple[str, ...]) -> str:
    return " ".join(argument if argument.startswith("--") else f"'{argument}'" for argument in arguments)


def test_the_guide_s_lines_are_accepted(namespace: Namespace) -> None:
    admin = namespace.admin
    for overlay, options in (("amlfs", GUIDE_AMLFS), ("blob", GUIDE_BLOB)):
        guide = f"{CHART} -f values/storage/{overlay}.yaml {quote(options)} --set pvc.name=guide-{overlay}"
        with installed(admin, f"guide-{overlay}", guide) as notes:
            assert claim(admin, f"guide-{overlay}")["spec"]["storageClassName"] == f"{namespace.name}.guide-{overlay}"
            assert f"--storage {'amlfs-125:16' if overlay == 'amlfs' else 'blob'} --data TB" in notes
            assert ("an old checkpoint tracker" in notes) == (overlay == "blob")


@pytest.mark.parametrize("overlay", STATIC)
def test_a_static_volume_is_deleted_with_its_release_and_bound_again(namespace: Namespace, overlay: str) -> None:
    admin, release = namespace.admin, f"storage-{overlay}"
    volume = f"{namespace.name}.{overlay}"
    for _ in range(2 if overlay == "nfs" else 1):  # the cluster takes up to half a minute to remove a volume
        with installed(admin, release, line(overlay)) as notes:
            assert "An uninstallation deletes the PVC and its volume" in notes
            assert wait_for(lambda: claim(admin, overlay)["status"]["phase"] == "Bound", 300)
            first = claim(admin, overlay)["metadata"]["uid"]
            assert admin.get(f"pv {volume}")["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
            admin.check(f"helm upgrade {release} {line(overlay)}")
            assert claim(admin, overlay)["metadata"]["uid"] == first
            ended = admin.run(f"helm upgrade {release} {line(overlay, '--set', OTHER_SIZE[overlay])}")
            assert ended.code != 0 and f'the PVC "{overlay}" exists with' in ended.err
        assert admin.run(f"kubectl get pvc {overlay}").code != 0
        assert admin.run(f"kubectl get pv {volume}").code != 0


def test_a_volume_keeps_its_options_and_the_notes_show_the_remedy(namespace: Namespace) -> None:
    admin = namespace.admin
    name = f"{namespace.name}.options"
    with installed(admin, "options", line("blob").replace("pvc.name=blob", "pvc.name=options")):
        # The driver would create this volume for the PVC.
        volume = {"accessModes": ["ReadWriteMany"], "capacity": {"storage": "100Ti"}, "storageClassName": name}
        volume |= {
            "mountOptions": ["-o attr_timeout=120"],
            "csi": {"driver": "blob.csi.azure.com", "volumeHandle": "a"},
        }
        volume |= {"claimRef": {"namespace": namespace.name, "name": "options"}}
        admin.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
        assert wait_for(lambda: claim(admin, "options")["status"]["phase"] == "Bound", 300)
        notes = admin.check(f"helm upgrade options {line('blob').replace('pvc.name=blob', 'pvc.name=options')}")
        (remedy,) = [row.partition("To change them: ")[2] for row in notes.splitlines() if "To change them: " in row]
        admin.check(remedy.partition(", then")[0])
        options = admin.get(f"storageclass {name}")["mountOptions"]
        assert admin.get(f"pv {name}")["spec"]["mountOptions"] == options
        notes = admin.check(f"helm upgrade options {line('blob').replace('pvc.name=blob', 'pvc.name=options')}")
        assert "To change them" not in notes


def test_a_claim_on_existing_storage_needs_only_rights_in_its_namespace(namespace: Namespace) -> None:
    user = namespace.user
    options = f"{CHART} -f values/storage/existing.yaml --set pvc.name=asked --set existing.storageClassName=none"
    with installed(user, "asked", options):
        first = claim(user, "asked")["metadata"]["uid"]
        user.check(f"helm upgrade asked {options}")
        ended = user.run(f"helm upgrade asked {options} --set pvc.size=1Gi")
        assert ended.code != 0 and "a PVC cannot shrink to 1Gi" in ended.err
    with installed(user, "asked", options):
        assert claim(user, "asked")["metadata"]["uid"] == first
    user.check("kubectl delete pvc asked --timeout=60s")


def test_two_releases_share_nothing(namespace: Namespace) -> None:
    admin = namespace.admin
    options = line("amlfs").replace("pvc.name=amlfs", "pvc.name={0}")
    with installed(admin, "one", options.format("one")), installed(admin, "two", options.format("two")):
        classes = {claim(admin, name)["spec"]["storageClassName"] for name in ("one", "two")}
        assert classes == {f"{namespace.name}.one", f"{namespace.name}.two"}
        ended = admin.run(f"helm install three {options.format('one')}")
        assert ended.code != 0 and 'the PVC "one" exists in namespace' in ended.err
        assert "does not belong to this release" in ended.err


# -- mounted and written

# Written as the stages write: a temporary name, fsync, a rename, an fsync of the directory. Prints the type of /data.
WRITE = """
import os, sys
path, text = sys.argv[1:]
with open(path + ".new", "x") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
os.rename(path + ".new", path)
directory = os.open(os.path.dirname(path), os.O_RDONLY)
os.fsync(directory)
print(open(path).read(), os.listdir(directory).count(os.path.basename(path)))
print(next(line.split()[2] for line in open("/proc/mounts") if line.split()[1] == "/data"))
"""


def run_in_pod(namespace: Namespace, name: str, *arguments: str) -> str:
    """Run Python in a restricted pod that mounts a claim at /data, and return its output."""
    container = {
        "name": "look",
        "image": IMAGE,
        "command": ["python", "-c", *arguments],
        "securityContext": CONFINED,
        "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": RESTRICTED,
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
    }
    user, pod = namespace.user, f"look-{os.urandom(3).hex()}"
    user.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec})
    try:
        ended = wait_for(lambda: user.get(f"pod {pod}")["status"]["phase"] in ("Succeeded", "Failed"), 300)
        events = user.run(f"kubectl get events --field-selector=involvedObject.name={pod}").out
        assert ended and user.get(f"pod {pod}")["status"]["phase"] == "Succeeded", events + namespace.logs(pod)
        return namespace.logs(pod)
    finally:
        user.check(f"kubectl delete pod {pod} --grace-period=1 --timeout=60s")


@pytest.mark.every_change
def test_a_directory_is_written_and_outlives_its_release(namespace: Namespace) -> None:
    directory = namespace.data / "own"
    directory.mkdir()
    directory.chmod(0o777)
    options = f"{CHART} -f values/storage/local.yaml --set pvc.name=own --set local.path={directory}"
    options += f" --set local.nodeName={node_name(namespace.admin)}"
    with installed(namespace.admin, "own", options):
        assert run_in_pod(namespace, "own", WRITE, "/data/a", "written").startswith("written 1\n")
    assert (directory / "a").read_text() == "written"
    with installed(namespace.admin, "own", options):
        assert run_in_pod(namespace, "own", "print(open('/data/a').read())") == "written\n"
        ended = namespace.admin.run(f"helm upgrade own {options} --set local.path=/elsewhere")
        assert ended.code != 0 and f'the volume "{namespace.name}.own" exists with local=' in ended.err


@pytest.fixture
def export() -> tuple[str, str]:
    """Return the server and the directory of an NFS export."""
    named = os.environ.get("TOKENMILL_E2E_NFS", "")
    server, _, directory = named.rpartition(":")
    if not server:
        pytest.skip("set TOKENMILL_E2E_NFS to an NFS export, SERVER:/DIRECTORY, that the node mounts: tests/e2e/nfs")
    return server, directory


def test_an_nfs_export_is_mounted_written_and_outlives_its_release(
    namespace: Namespace, export: tuple[str, str]
) -> None:
    mount_options = os.environ.get("TOKENMILL_E2E_NFS_OPTIONS")  # if the server needs others than the overlay's
    options = f"{CHART} -f values/storage/nfs.yaml --set pvc.name=export"
    options += f" --set nfs.server={export[0]} --set nfs.path={export[1]}"
    if mount_options:
        options += f" --set nfs.version= --set nfs.nconnect=null --set 'storage.mountOptions={{{mount_options}}}'"
    text, file = os.urandom(8).hex(), f"/data/{namespace.name}"
    with installed(namespace.admin, "export", options):
        content, kind = run_in_pod(namespace, "export", WRITE, file, text).splitlines()
        assert content == f"{text} 1"
        assert "nfs" in kind
    with installed(namespace.admin, "export", options):
        program = f"import os; print(open({file!r}).read()); os.remove({file!r}); print(os.path.exists({file!r}))"
        assert run_in_pod(namespace, "export", program) == f"{text}\nFalse\n"
