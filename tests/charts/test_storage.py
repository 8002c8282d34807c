"""charts/shared-storage without a cluster: what each back end renders and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import HELMS, ROOT, helm, overlays, validate_manifests
from support.storage import FSX, GUIDE_AMLFS, GUIDE_BLOB, NEEDED, SKU
from support.storage_chart import CHART, render, template

GOLDEN = Path(__file__).parent / "golden/shared-storage"


def refused(overlay: str, *words: str, program: str = "helm", **settings: Any) -> str:
    """Return what Helm says when the chart refuses, from the chart's own line on."""
    done = template(overlay, *words, program=program, **settings)
    assert done.returncode != 0, done.stdout
    said: str = done.stderr.partition("): \n")[2].partition("\n\nUse --debug")[0].strip()
    return said


# -- what it renders


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("overlay", [file.stem for file in overlays("storage")])
def test_each_back_end_renders_what_its_driver_takes(overlay: str, program: str) -> None:
    assert render(overlay, program=program) == list(yaml.safe_load_all((GOLDEN / f"{overlay}.yaml").read_text()))


@pytest.mark.parametrize("overlay", [*NEEDED])
def test_the_api_server_would_take_it(overlay: str) -> None:
    validate_manifests(template(overlay).stdout)


@pytest.mark.parametrize("program", HELMS)
def test_the_guide_s_lines_work_as_they_stand(program: str) -> None:
    storage_class, claim = render("amlfs", *GUIDE_AMLFS, program=program)
    assert storage_class["parameters"]["sku-name"] == SKU
    assert claim["spec"]["resources"]["requests"]["storage"] == "16Ti"
    assert claim["metadata"]["name"] == "shared-storage-pvc"
    storage_class, _ = render("blob", *GUIDE_BLOB, program=program)
    assert storage_class["mountOptions"] == json.loads(GUIDE_BLOB[1].partition("=")[2])


def test_every_parameter_of_a_driver_reaches_it() -> None:
    sets = {"amlfs.location": "eastus2", "amlfs.resourceGroupName": "g", "amlfs.vnetResourceGroup": "vg"}
    sets |= {"amlfs.vnetName": "v", "amlfs.subnetName": "s", "amlfs.identities": "{/a,/b}", "amlfs.tags.team": "data"}
    sets |= {"amlfs.tags.cost": "7", "amlfs.subDir": "corpora", "amlfs.zone": "2"}
    found = render("amlfs", **sets)[0]["parameters"]
    assert found == {
        "sku-name": SKU,
        "zone": "2",
        "maintenance-day-of-week": "Sunday",
        "maintenance-time-of-day-utc": "02:00",
        "location": "eastus2",
        "resource-group-name": "g",
        "vnet-resource-group": "vg",
        "vnet-name": "v",
        "subnet-name": "s",
        "identities": "/a,/b",
        "tags": "cost=7,team=data",
        "sub-dir": "corpora",
    }
    sets = {"fsx.dataCompressionType": "LZ4", "fsx.efaEnabled": "true", "fsx.metadataConfigurationMode": "AUTOMATIC"}
    sets |= {"fsx.storageCapacityGiB": "19200", "fsx.extraTags.team": "data", "fsx.kmsKeyId": "k"}
    sets |= {"fsx.automaticBackupRetentionDays": "1", "fsx.dailyAutomaticBackupStartTime": "01:00"}
    found = render("fsx", **sets)[0]["parameters"]
    assert found == {
        "deploymentType": "PERSISTENT_2",
        "perUnitStorageThroughput": "250",
        "fileSystemTypeVersion": "2.15",
        "subnetId": "subnet-0a",
        "securityGroupIds": "sg-0a",
        "dataCompressionType": "LZ4",
        "efaEnabled": "true",
        "metadataConfigurationMode": "AUTOMATIC",
        "extraTags": "team=data",
        "kmsKeyId": "k",
        "automaticBackupRetentionDays": "1",
        "dailyAutomaticBackupStartTime": "01:00",
    }
    scratch = {"fsx.deploymentType": "SCRATCH_2", "fsx.perUnitStorageThroughput": "null"}
    imported = {
        "fsx.s3ImportPath": "s3://b/in",
        "fsx.s3ExportPath": "s3://b/out",
        "fsx.autoImportPolicy": "NEW_CHANGED",
    }
    found = render("fsx", **scratch, **imported)[0]["parameters"]
    assert {f"fsx.{key}": value for key, value in found.items()}.items() >= imported.items()
    sets = {"blob.isHnsEnabled": "true", "blob.storageAccount": "corpora", "blob.accessTier": "Hot"}
    sets |= {"storage.parameters.softDeleteBlobs": "7"}
    found = render("blob", **sets)[0]["parameters"]
    assert found == {
        "protocol": "fuse2",
        "isHnsEnabled": "true",
        "storageAccount": "corpora",
        "accessTier": "Hot",
        "softDeleteBlobs": "7",
    }


def test_the_caches_of_blobfuse_become_its_options() -> None:
    sets = {"blob.cache": "block", "blob.blockCache.poolSizeMb": "8192", "blob.blockCache.prefetch": "20"}
    options = render("blob", **sets)[0]["mountOptions"]
    assert options[-5:] == [
        "--block-cache",
        "--block-cache-block-size=32",
        "--block-cache-pool-size=8192",
        "--block-cache-parallelism=80",
        "--block-cache-prefetch=20",
    ]
    # Unasked, BlobFuse reads two blocks ahead for each CPU: more than this pool holds, on a node of 96.
    assert render("blob", **{"blob.cache": "block"})[0]["mountOptions"][-1] == "--block-cache-prefetch=11"
    sets = {
        "blob.fileCache.timeoutSeconds": "5",
        "blob.fileCache.path": "/mnt/nvme",
        "blob.attributeTimeoutSeconds": "3",
    }
    options = render("blob", **sets)[0]["mountOptions"]
    assert {"--file-cache-timeout-in-seconds=5", "--tmp-path=/mnt/nvme", "-o attr_timeout=3"} <= {*options}
    assert "--block-cache" not in options


@pytest.mark.parametrize("program", HELMS)
def test_a_section_that_is_null_is_as_good_as_empty(program: str) -> None:
    sets = dict.fromkeys(("amlfs", "fsx", "nfs", "local", "existing", "storage.parameters", "blob.blockCache"), "null")
    assert render("blob", program=program, **sets) == render("blob")


def test_names_belong_to_one_release() -> None:
    def name(namespace: str, release: str, overlay: str = "amlfs", claim: str = "data") -> str:
        file = ROOT / f"values/storage/{overlay}.yaml"
        sets = [part for key, value in NEEDED[overlay].items() for part in ("--set", f"{key}={value}")]
        done = helm("template", release, CHART, "-n", namespace, "-f", file, "--set", f"pvc.name={claim}", *sets)
        return str(next(yaml.safe_load_all(done.stdout))["metadata"]["name"])

    assert len({name("a", "b"), name("a", "b.c"), name("a-b", "c"), name("a", "b-c"), name("b", "a")}) == 5
    assert name("a-b", "r", "nfs", "c") != name("a", "r", "nfs", "b-c")


# -- what it refuses

STEPS = (
    "{} is no multiple of {}, the step of amlfs.skuName=AMLFS-Durable-Premium-{}: the file system would have, and cost,"
)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "existing",
        {"backend": "glusterfs"},
        'backend="glusterfs": there is no such back end; there are amlfs, blob, existing, fsx, local, nfs.\n'
        "Take one with -f values/storage/NAME.yaml, or --set backend=NAME.",
    ),
    (
        "existing",  # the guide's line without the overlay
        {"amlfs.skuName": SKU, "amlfs.storageCapacityTiB": 16},
        "backend=existing does not read amlfs.skuName, amlfs.storageCapacityTiB.\n"
        "Set backend=amlfs (-f values/storage/amlfs.yaml does), or leave out what is amlfs's.",
    ),
    (
        "blob",
        {"blob.cache": "block", "nfs.server": "s", "backend": "nfs"},
        "backend=nfs does not read blob.cache, blob.protocol.\n"
        "Set backend=blob (-f values/storage/blob.yaml does), or leave out what is blob's.",
    ),
    ("existing", {"storage.pvcName": "x"}, "storage.pvcName is not a value of this chart.\nSet pvc.name instead."),
    (
        "amlfs",
        {"storage.amlfs.skuName": SKU},
        "storage.amlfs is not a value of this chart.\nSet amlfs, at the root of the values instead.",
    ),
    (
        "amlfs",
        {"pvc.size": "16Ti"},
        "pvc.size=16Ti is not read with backend=amlfs, whose size is amlfs.storageCapacityTiB.\n"
        "Set that and leave out pvc.size.",
    ),
    (
        "local",
        {"storage.mountOptions": "{noatime}"},
        "storage.mountOptions are not read with backend=local: a directory of the node is not mounted.\n"
        "Leave them out, or choose the back end that they are for, as -f values/storage/blob.yaml does.",
    ),
    (
        "nfs",
        {"storage.parameters.a": "b"},
        "storage.parameters are a StorageClass's, and backend=nfs makes none.\nLeave them out.",
    ),
    # amlfs
    (
        "amlfs",
        {"amlfs.storageCapacityTiB": 20},
        f"amlfs.storageCapacityTiB={STEPS.format(20, 16, 125)} 32 TiB.\nSet 16 or 32.",
    ),
    ("amlfs", {"amlfs.storageCapacityTiB": 4}, f"amlfs.storageCapacityTiB={STEPS.format(4, 16, 125)} 16 TiB.\nSet 16."),
    (
        "amlfs",
        {"amlfs.skuName": "AMLFS-Durable-Premium-40"},
        f"amlfs.storageCapacityTiB={STEPS.format(16, 48, 40)} 48 TiB.\nSet 48.",
    ),
    (
        "amlfs",
        {"amlfs.skuName": "AMLFS-Durable-Premium-500", "amlfs.storageCapacityTiB": 512},
        "amlfs.storageCapacityTiB=512 is above 128, the most that a subscription gets unasked for "
        "amlfs.skuName=AMLFS-Durable-Premium-500.\n"
        "Set at most 128, or, where Microsoft raised it for yours, --set amlfs.maximumCapacityTiB=512.",
    ),
    (
        "amlfs",
        {"amlfs.storageCapacityTiB": 512, "amlfs.maximumCapacityTiB": 256},
        "amlfs.storageCapacityTiB=512 is above 256, the most that amlfs.maximumCapacityTiB allows for "
        "amlfs.skuName=AMLFS-Durable-Premium-125.\nSet at most 256.",
    ),
    (
        "amlfs-static",
        {"amlfs.mgsIpAddress": None},
        "backend=amlfs needs amlfs.skuName, amlfs.maintenanceDayOfWeek, amlfs.maintenanceTimeOfDayUtc.\n"
        "Add -f values/storage/amlfs.yaml, which sets them; for a file system that is there, "
        "-f values/storage/amlfs-static.yaml --set amlfs.mgsIpAddress=ADDRESS.",
    ),
    (
        "amlfs",
        {"amlfs.mgsIpAddress": "10.1.0.4"},
        "amlfs.mgsIpAddress=10.1.0.4 names what is there, and amlfs.zone, amlfs.maintenanceDayOfWeek, "
        "amlfs.maintenanceTimeOfDayUtc would make another.\nLeave out the one or the others; "
        "-f values/storage/amlfs-static.yaml in place of amlfs.yaml sets none of them.",
    ),
    (
        "amlfs-static",
        {"amlfs.storageCapacityTiB": None},
        "backend=amlfs needs amlfs.storageCapacityTiB.\n"
        "Add --set amlfs.storageCapacityTiB=SIZE, that of the file system which is there.",
    ),
    (
        "amlfs",
        {"amlfs.subDir": "${pod.metadata.name}"},
        'amlfs.subDir="${pod.metadata.name}" differs from pod to pod, and the stages share one directory.\n'
        "Leave the pod out of it.",
    ),
    (
        "amlfs-static",
        {"amlfs.subDir": "${pvc.metadata.name}"},
        'amlfs.subDir="${pvc.metadata.name}": the driver knows no claim and no volume beside amlfs.mgsIpAddress.\n'
        "Write the directory's name.",
    ),
    # blob
    (
        "blob",
        {"blob.cache": "block", "blob.fileCache.sizeMb": 1000},
        "blob.cache=block and blob.fileCache.sizeMb contradict each other: BlobFuse keeps whole files on disk or "
        "blocks in memory, never both, and would drop the files' cache.\nLeave out the one or the other.",
    ),
    (
        "blob",
        {"blob.blockCache.poolSizeMb": 4096, "blob.fileCache.timeoutSeconds": 0},
        "blob.blockCache.poolSizeMb and blob.fileCache.timeoutSeconds contradict each other: BlobFuse keeps whole "
        "files on disk or blocks in memory, never both, and would drop the files' cache.\n"
        "Leave out the one or the other.",
    ),
    (
        "blob",
        {"blob.blockCache.poolSizeMb": 4096},
        "blob.blockCache.poolSizeMb is read with blob.cache=block alone.\nSet that, or leave it out.",
    ),
    (
        "blob",
        {"blob.cache": "block", "blob.blockCache.prefetch": 200},
        "blob.blockCache.prefetch=200 blocks of 32 MB are 6400 MB, above the 4096 MB of blob.blockCache.poolSizeMb: "
        "the mount would fail.\n"
        "Lower prefetch, to 11 at least, or blockSizeMb, or raise poolSizeMb, which is memory of each node.",
    ),
    (
        "blob",
        {"blob.cache": "block", "blob.blockCache.poolSizeMb": 256},
        "blob.blockCache.prefetch=11 blocks of 32 MB are 352 MB, above the 256 MB of blob.blockCache.poolSizeMb: "
        "the mount would fail.\n"
        "Lower prefetch, to 11 at least, or blockSizeMb, or raise poolSizeMb, which is memory of each node.",
    ),
    (
        "fsx",
        {"fsx.fileSystemTypeVersion": "2.12", "fsx.metadataConfigurationMode": "AUTOMATIC"},
        "fsx.fileSystemTypeVersion=2.12 is not allowed with fsx.metadataConfigurationMode.\nSet 2.15.",
    ),
    (
        "blob",
        {"storage.parameters.Protocol": "nfs"},
        'storage.parameters.Protocol stands against protocol="fuse2", which the chart makes of the section blob.\n'
        "Set it there, and leave it out here.",
    ),
    (
        "blob",
        {"blob": "null"},
        "backend=blob needs its section of values, and blob is null.\nTake out what sets it so.",
    ),
    (
        "blob",
        {"blob.cache": "file", "storage.mountOptions": "{-o allow_other}"},
        "storage.mountOptions stand in place of all that the chart makes of blob.cache.\n"
        "Leave out the one or the others.",
    ),
    (
        "blob-nfs",
        {"blob.cache": "file", "blob.azureStorageAuthType": "MSI"},
        "blob.protocol=nfs does not read blob.cache, blob.azureStorageAuthType, which are BlobFuse's.\n"
        "Leave them out, or set blob.protocol=fuse2.",
    ),
    (
        "blob-nfs",
        {"blob.isHnsEnabled": "false"},
        "blob.isHnsEnabled=false contradicts blob.protocol=nfs, which has a hierarchical namespace always.\n"
        "Leave it out.",
    ),
    (
        "blob-static",
        {"blob.storageAccount": None},
        "blob.containerName=slimpajama is a container of blob.storageAccount, which is not set.\n"
        "Add --set blob.storageAccount=ACCOUNT, or leave out the container and have a new one made.",
    ),
    (
        "blob-static",
        {"blob.skuName": "Premium_LRS", "storage.parameters.a": "b"},
        "blob.containerName=slimpajama names what is there, and blob.skuName, storage.parameters.a would make "
        "another.\nLeave out the one or the others; -f values/storage/blob-static.yaml in place of blob.yaml sets none "
        "of them.",
    ),
    (
        "blob-static",
        {"blob.containerName": None},
        "blob.secretName is read for a container that is there, blob.containerName; for a new one the driver keeps the "
        "key itself.\nLeave it out, or name the container.",
    ),
    (
        "blob",
        {"blob.subscriptionID": "x"},
        "blob.subscriptionID needs blob.resourceGroup, the account's.\nAdd --set blob.resourceGroup=GROUP.",
    ),
    # fsx
    (
        "fsx",
        {"fsx.subnetId": None, "fsx.securityGroupIds": None},
        "backend=fsx needs fsx.subnetId, fsx.securityGroupIds.\nAdd -f values/storage/fsx.yaml and --set "
        "fsx.subnetId=subnet-... --set 'fsx.securityGroupIds={sg-...}', those of the nodes; for a file system that is "
        "there, -f values/storage/fsx-static.yaml.",
    ),
    (
        "fsx",
        {"fsx.perUnitStorageThroughput": 200},
        "fsx.perUnitStorageThroughput=200 is not allowed for fsx.deploymentType=PERSISTENT_2, which has 125, 250, 500, "
        "1000 MB/s for each TiB.\nSet one of them.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1"},
        "fsx.perUnitStorageThroughput=250 is not allowed for fsx.deploymentType=PERSISTENT_1, which has 50, 100, 200 "
        "MB/s for each TiB.\nSet one of them.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1", "fsx.storageType": "HDD", "fsx.driveCacheType": "READ"},
        "fsx.perUnitStorageThroughput=250 is not allowed for fsx.deploymentType=PERSISTENT_1, which has 12, 40 MB/s "
        "for each TiB on HDD.\nSet one of them.",
    ),
    (
        "fsx",
        {"fsx.perUnitStorageThroughput": "null"},
        "fsx.perUnitStorageThroughput is not set for fsx.deploymentType=PERSISTENT_2, which has 125, 250, 500, 1000 "
        "MB/s for each TiB.\nSet one of them.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "SCRATCH_2"},
        "fsx.perUnitStorageThroughput=250 is not allowed for fsx.deploymentType=SCRATCH_2, which has 200 MB/s for each "
        "TiB.\nAdd --set fsx.perUnitStorageThroughput=null, or choose a persistent type.",
    ),
    (
        "fsx",
        {"fsx.storageCapacityGiB": 3000},
        "fsx.storageCapacityGiB=3000 is not allowed for fsx.deploymentType=PERSISTENT_2, which has 1200 and multiples "
        "of 2400.\nSet 1200 or 2400 or 4800.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "SCRATCH_1", "fsx.perUnitStorageThroughput": "null", "fsx.storageCapacityGiB": 4800},
        "fsx.storageCapacityGiB=4800 is not allowed for fsx.deploymentType=SCRATCH_1, which has 1200, 2400 and "
        "multiples of 3600.\nSet 1200 or 2400 or 3600 or 7200.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "PERSISTENT_1",
            "fsx.storageType": "HDD",
            "fsx.driveCacheType": "NONE",
            "fsx.perUnitStorageThroughput": 12,
        },
        "fsx.storageCapacityGiB=4800 is not allowed for HDD with 12 MB/s for each TiB, which has multiples of 6000.\n"
        "Set 6000.",
    ),
    (
        "fsx",
        {"fsx.efaEnabled": "true", "fsx.metadataConfigurationMode": "AUTOMATIC"},
        "fsx.storageCapacityGiB=4800 is not allowed for EFA with 250 MB/s for each TiB, which has multiples of 19200.\n"
        "Set 19200.",
    ),
    (
        "fsx",
        {"fsx.efaEnabled": "true"},
        "fsx.efaEnabled needs fsx.deploymentType=PERSISTENT_2 with fsx.metadataConfigurationMode.\n"
        "Set both, AUTOMATIC for the second.",
    ),
    (
        "fsx",
        {"fsx.storageType": "HDD"},
        "fsx.storageType=HDD is not allowed for fsx.deploymentType=PERSISTENT_2.\n"
        "Set fsx.deploymentType=PERSISTENT_1, or take SSD.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1", "fsx.storageType": "HDD", "fsx.perUnitStorageThroughput": 12},
        "fsx.storageType=HDD needs fsx.driveCacheType.\nSet NONE or READ.",
    ),
    ("fsx", {"fsx.driveCacheType": "READ"}, "fsx.driveCacheType=READ is for fsx.storageType=HDD.\nLeave it out."),
    (
        "fsx",
        {"fsx.s3ImportPath": "s3://b/in"},
        "fsx.s3ImportPath cannot be set with fsx.deploymentType=PERSISTENT_2.\nChoose SCRATCH_2 or PERSISTENT_1, or "
        "link the bucket when the file system is there: aws fsx create-data-repository-association.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "SCRATCH_2",
            "fsx.perUnitStorageThroughput": "null",
            "fsx.s3ImportPath": "s3://b/in",
            "fsx.s3ExportPath": "s3://c/out",
        },
        "fsx.s3ExportPath=s3://c/out is in another bucket than fsx.s3ImportPath=s3://b/in.\n"
        "Give two paths in one bucket.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "SCRATCH_2",
            "fsx.perUnitStorageThroughput": "null",
            "fsx.autoImportPolicy": "NEW",
        },
        "fsx.autoImportPolicy needs fsx.s3ImportPath.\nSet it, to the same bucket.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "SCRATCH_2", "fsx.perUnitStorageThroughput": "null", "fsx.kmsKeyId": "k"},
        "fsx.kmsKeyId is not allowed for fsx.deploymentType=SCRATCH_2.\nLeave it out, or choose a persistent type.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "SCRATCH_2",
            "fsx.perUnitStorageThroughput": "null",
            "fsx.automaticBackupRetentionDays": 3,
        },
        "fsx.automaticBackupRetentionDays: there are no backups of a file system that is scratch.\nLeave them out.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1", "fsx.perUnitStorageThroughput": 50}
        | {"fsx.s3ImportPath": "s3://b/in", "fsx.automaticBackupRetentionDays": 3},
        "fsx.automaticBackupRetentionDays: there are no backups of a file system that is linked to S3.\n"
        "Leave them out.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1", "fsx.perUnitStorageThroughput": 50}
        | {"fsx.metadataConfigurationMode": "AUTOMATIC"},
        "fsx.metadataConfigurationMode cannot be set with fsx.deploymentType=PERSISTENT_1.\n"
        "Leave them out, or choose PERSISTENT_2.",
    ),
    (
        "fsx",
        {"fsx.metadataIops": 1500},
        "fsx.metadataIops=1500 is for fsx.metadataConfigurationMode=USER_PROVISIONED.\nSet that, or leave it out.",
    ),
    (
        "fsx",
        {"fsx.metadataIops": 5000, "fsx.metadataConfigurationMode": "USER_PROVISIONED"},
        "fsx.metadataIops=5000 is not allowed.\nSet 1500, 3000, 6000 or a multiple of 12000 up to 192000.",
    ),
    (
        "fsx-static",
        {"fsx.mountName": None},
        "backend=fsx needs fsx.mountName.\n`aws fsx describe-file-systems` has them for a file system that is there: "
        "FileSystemId, DNSName, LustreConfiguration.MountName, StorageCapacity.",
    ),
    (
        "fsx-static",
        FSX,
        "fsx.volumeHandle=fs-0a names what is there, and fsx.securityGroupIds, fsx.subnetId would make another.\n"
        "Leave out the one or the others; -f values/storage/fsx-static.yaml in place of fsx.yaml sets none of them.",
    ),
    # nfs, local
    (
        "nfs",
        {"nfs.server": None, "nfs.path": None},
        "backend=nfs needs nfs.server, nfs.path.\n"
        "Add --set nfs.server=SERVER --set nfs.path=/DIRECTORY, as `showmount -e SERVER` lists them.",
    ),
    (
        "nfs",
        {"storage.mountOptions": "{hard}"},
        "storage.mountOptions stand in place of all that the chart makes, nfs.version, nfs.nconnect among them.\n"
        "Leave out the one or the others: --set nfs.version= --set nfs.nconnect=null.",
    ),
    (
        "local",
        {"local.path": "data"},
        "backend=local needs local.path, a directory that exists on the node, from its root, and local.nodeName, the "
        "node's name (kubectl get nodes).\nAdd --set local.path=/DIRECTORY --set local.nodeName=NODE.",
    ),
]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(("overlay", "settings", "message"), REFUSED)
def test_what_the_provider_would_refuse_is_refused_at_once(
    overlay: str, settings: dict[str, Any], message: str, program: str
) -> None:
    assert refused(overlay, program=program, **settings) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"amlfs.skuName": "AMLFS-Durable-Premium-60"},
        {"amlfs.mgsIpAddress": "server"},
        {"amlfs.storageCapacityTiB": "0"},
        {"pvc.size": "0"},
        {"pvc.size": "-1Gi"},
        {"pvc.size": "1GiB"},
        {"fsx.automaticBackupRetentionDays": "91"},
        {"fsx.dailyAutomaticBackupStartTime": "9:00"},
        {"blob.blockCache.prefetch": "10"},
        {"amlfs.maintenanceTimeOfDayUtc": "25:00"},
        {"amlfs.tags.team": "a=b"},
        {"amlfs.colour": "red"},
        {"blob.protocol": "smb"},
        {"fsx.subnetId": "10.0.0.0/24"},
        {"fsx.deploymentType": "PERSISTENT_3"},
        {"nfs.nconnect": "17"},
        {"nfs.path": "export"},
        {"pvc.name": "Shared_Storage"},
    ],
)
def test_the_schema_refuses_what_no_driver_takes(settings: dict[str, str]) -> None:
    done = template("existing", **settings)
    assert done.returncode != 0
    (key,) = settings
    assert f"/{key.replace('.', '/')}" in done.stderr or f"'{key.rpartition('.')[2]}' not allowed" in done.stderr


def test_the_schema_wants_what_every_back_end_reads() -> None:
    assert "missing property 'pvc'" in template("blob", pvc="null").stderr


def test_a_maximum_that_was_raised_is_taken() -> None:
    sets = {"amlfs.storageCapacityTiB": 512, "amlfs.maximumCapacityTiB": 512}
    assert render("amlfs", **sets)[1]["spec"]["resources"]["requests"]["storage"] == "512Ti"
