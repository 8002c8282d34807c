"""charts/shared-storage without a cluster: the objects that each back end renders, and the values that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import HELMS, ROOT, helm, overlays, validate_manifests
from support.storage import FSX, GUIDE_AMLFS, GUIDE_BLOB, NEEDED, SKU
from support.storage_chart import CHART, render, template

GOLDEN = Path(__file__).parent / "golden/shared-storage"


def refusal(overlay: str, *arguments: str, program: str = "helm", **settings: Any) -> str:
    """Return the message of a refusal, from the chart's own line on."""
    done = template(overlay, *arguments, program=program, **settings)
    assert done.returncode != 0, done.stdout
    message: str = done.stderr.partition("): \n")[2].partition("\n\nUse --debug")[0].strip()
    return message


# -- rendered objects


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("overlay", [file.stem for file in overlays("storage")])
def test_each_back_end_renders_parameters_of_its_driver(overlay: str, program: str) -> None:
    assert render(overlay, program=program) == list(yaml.safe_load_all((GOLDEN / f"{overlay}.yaml").read_text()))


@pytest.mark.parametrize("overlay", [*NEEDED])
def test_the_api_server_would_accept_it(overlay: str) -> None:
    validate_manifests(template(overlay).stdout)


@pytest.mark.parametrize("program", HELMS)
def test_the_guide_s_lines_work_unchanged(program: str) -> None:
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
    parameters = render("amlfs", **sets)[0]["parameters"]
    assert parameters == {
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
    parameters = render("fsx", **sets)[0]["parameters"]
    assert parameters == {
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
    parameters = render("fsx", **scratch, **imported)[0]["parameters"]
    assert {f"fsx.{key}": value for key, value in parameters.items()}.items() >= imported.items()
    sets = {"blob.isHnsEnabled": "true", "blob.storageAccount": "corpora", "blob.accessTier": "Hot"}
    sets |= {"storage.parameters.softDeleteBlobs": "7"}
    parameters = render("blob", **sets)[0]["parameters"]
    assert parameters == {
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
    # By default BlobFuse prefetches two blocks for each CPU: on a node with 96 CPUs, more than this pool holds.
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
def test_a_null_section_equals_an_empty_one(program: str) -> None:
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


# -- refused values

STEPS = "{} is not a multiple of {}, the step of amlfs.skuName=AMLFS-Durable-Premium-{}: Azure would create, and bill,"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "existing",
        {"backend": "glusterfs"},
        'backend="glusterfs" is not a back end; the back ends are amlfs, blob, existing, fsx, local, nfs.\n'
        "Select one with -f values/storage/NAME.yaml, or --set backend=NAME.",
    ),
    (
        "existing",  # the guide's line without the overlay
        {"amlfs.skuName": SKU, "amlfs.storageCapacityTiB": 16},
        "backend=existing does not read amlfs.skuName, amlfs.storageCapacityTiB.\n"
        "Set backend=amlfs (-f values/storage/amlfs.yaml does), or remove the keys of amlfs.",
    ),
    (
        "blob",
        {"blob.cache": "block", "nfs.server": "s", "backend": "nfs"},
        "backend=nfs does not read blob.cache, blob.protocol.\n"
        "Set backend=blob (-f values/storage/blob.yaml does), or remove the keys of blob.",
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
        "Set that key and remove pvc.size.",
    ),
    (
        "local",
        {"storage.mountOptions": "{noatime}"},
        "storage.mountOptions is not read with backend=local: a directory of the node is not mounted.\n"
        "Remove it, or select a back end with mount options, for example -f values/storage/blob.yaml.",
    ),
    (
        "nfs",
        {"storage.parameters.a": "b"},
        "storage.parameters applies to a StorageClass, but backend=nfs does not create one.\nRemove it.",
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
        "amlfs-static",
        {"amlfs.mgsIpAddress": None},
        "backend=amlfs needs amlfs.skuName, amlfs.maintenanceDayOfWeek, amlfs.maintenanceTimeOfDayUtc.\n"
        "Add -f values/storage/amlfs.yaml, which sets them. For an existing file system: "
        "-f values/storage/amlfs-static.yaml --set amlfs.mgsIpAddress=ADDRESS.",
    ),
    (
        "amlfs",
        {"amlfs.mgsIpAddress": "10.1.0.4"},
        "amlfs.mgsIpAddress=10.1.0.4 names existing storage, but amlfs.zone, amlfs.maintenanceDayOfWeek, "
        "amlfs.maintenanceTimeOfDayUtc would create a new one.\n"
        "Remove the first key or the others; -f values/storage/amlfs-static.yaml, used instead of amlfs.yaml, sets "
        "none of the others.",
    ),
    (
        "amlfs-static",
        {"amlfs.storageCapacityTiB": None},
        "backend=amlfs needs amlfs.storageCapacityTiB.\n"
        "Add --set amlfs.storageCapacityTiB=SIZE, the size of the existing file system.",
    ),
    (
        "amlfs",
        {"amlfs.subDir": "${pod.metadata.name}"},
        'amlfs.subDir="${pod.metadata.name}" differs from pod to pod, but the stages must share one directory.\n'
        "Remove the pod from it.",
    ),
    (
        "amlfs-static",
        {"amlfs.subDir": "${pvc.metadata.name}"},
        'amlfs.subDir="${pvc.metadata.name}" contains a variable of the PVC or volume, which the driver cannot '
        "replace with amlfs.mgsIpAddress.\n"
        "Set the directory's name.",
    ),
    # blob
    (
        "blob",
        {"blob.cache": "block", "blob.fileCache.sizeMb": 1000},
        "blob.cache=block and blob.fileCache.sizeMb contradict each other: BlobFuse caches either complete files on "
        "disk or blocks in memory, and would not use the file cache.\n"
        "Remove one of them.",
    ),
    (
        "blob",
        {"blob.blockCache.poolSizeMb": 4096, "blob.fileCache.timeoutSeconds": 0},
        "blob.blockCache.poolSizeMb and blob.fileCache.timeoutSeconds contradict each other: BlobFuse caches either "
        "complete files on disk or blocks in memory, and would not use the file cache.\n"
        "Remove one of them.",
    ),
    (
        "blob",
        {"blob.blockCache.poolSizeMb": 4096},
        "blob.blockCache.poolSizeMb is read only with blob.cache=block.\nSet blob.cache=block, or remove the key.",
    ),
    (
        "blob",
        {"blob.cache": "block", "blob.blockCache.prefetch": 200},
        "blob.blockCache.prefetch=200 blocks of 32 MB need 6400 MB, more than the 4096 MB of "
        "blob.blockCache.poolSizeMb: the mount would fail.\n"
        "Lower prefetch (at least 11) or blockSizeMb, or raise poolSizeMb, the memory on each node.",
    ),
    (
        "blob",
        {"blob.cache": "block", "blob.blockCache.poolSizeMb": 256},
        "blob.blockCache.prefetch=11 blocks of 32 MB need 352 MB, more than the 256 MB of "
        "blob.blockCache.poolSizeMb: the mount would fail.\n"
        "Lower prefetch (at least 11) or blockSizeMb, or raise poolSizeMb, the memory on each node.",
    ),
    (
        "blob",
        {"storage.parameters.Protocol": "nfs"},
        'storage.parameters.Protocol contradicts protocol="fuse2", which the chart derives from the section blob.\n'
        "Set the key in that section, and remove it from storage.parameters.",
    ),
    (
        "blob",
        {"blob": "null"},
        "backend=blob needs its section of values, but blob is null.\nRemove the setting that makes it null.",
    ),
    (
        "blob",
        {"blob.cache": "file", "storage.mountOptions": "{-o allow_other}"},
        "storage.mountOptions replaces all mount options that the chart derives from blob.cache.\n"
        "Remove storage.mountOptions, or the other keys.",
    ),
    (
        "blob-nfs",
        {"blob.cache": "file", "blob.azureStorageAuthType": "MSI"},
        "blob.protocol=nfs does not read blob.cache, blob.azureStorageAuthType, which apply to BlobFuse.\n"
        "Remove them, or set blob.protocol=fuse2.",
    ),
    (
        "blob-nfs",
        {"blob.isHnsEnabled": "false"},
        "blob.isHnsEnabled=false contradicts blob.protocol=nfs, which always has a hierarchical namespace.\nRemove it.",
    ),
    (
        "blob-static",
        {"blob.storageAccount": None},
        "blob.containerName=slimpajama needs blob.storageAccount, which is not set.\n"
        "Add --set blob.storageAccount=ACCOUNT, or remove blob.containerName to create a new container.",
    ),
    (
        "blob-static",
        {"blob.skuName": "Premium_LRS", "storage.parameters.a": "b"},
        "blob.containerName=slimpajama names existing storage, but blob.skuName, storage.parameters.a would create a "
        "new one.\n"
        "Remove the first key or the others; -f values/storage/blob-static.yaml, used instead of blob.yaml, sets "
        "none of the others.",
    ),
    (
        "blob-static",
        {"blob.containerName": None},
        "blob.secretName is read only for an existing container, blob.containerName; for a new container the driver "
        "stores the key itself.\n"
        "Remove it, or set blob.containerName.",
    ),
    (
        "blob",
        {"blob.subscriptionID": "x"},
        "blob.subscriptionID needs blob.resourceGroup, the resource group of the account.\n"
        "Add --set blob.resourceGroup=GROUP.",
    ),
    # fsx
    (
        "fsx",
        {"fsx.subnetId": None, "fsx.securityGroupIds": None},
        "backend=fsx needs fsx.subnetId, fsx.securityGroupIds.\nAdd -f values/storage/fsx.yaml and --set "
        "fsx.subnetId=subnet-... --set 'fsx.securityGroupIds={sg-...}', those of the nodes. For an existing file "
        "system: -f values/storage/fsx-static.yaml.",
    ),
    (
        "fsx",
        {"fsx.storageCapacityGiB": 3000},
        "fsx.storageCapacityGiB=3000 is not allowed for fsx.deploymentType=PERSISTENT_2, which allows 1200 and "
        "multiples of 2400.\n"
        "Set it to 1200 or 2400 or 4800.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "SCRATCH_1", "fsx.perUnitStorageThroughput": "null", "fsx.storageCapacityGiB": 4800},
        "fsx.storageCapacityGiB=4800 is not allowed for fsx.deploymentType=SCRATCH_1, which allows 1200, 2400 and "
        "multiples of 3600.\n"
        "Set it to 1200 or 2400 or 3600 or 7200.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "PERSISTENT_1",
            "fsx.storageType": "HDD",
            "fsx.driveCacheType": "NONE",
            "fsx.perUnitStorageThroughput": 12,
        },
        "fsx.storageCapacityGiB=4800 is not allowed for HDD with 12 MB/s per TiB, which allows multiples of 6000.\n"
        "Set it to 6000.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "SCRATCH_2", "fsx.perUnitStorageThroughput": "null", "fsx.kmsKeyId": "k"},
        "fsx.kmsKeyId is not allowed for fsx.deploymentType=SCRATCH_2.\nRemove it, or choose a persistent type.",
    ),
    (
        "fsx",
        {
            "fsx.deploymentType": "SCRATCH_2",
            "fsx.perUnitStorageThroughput": "null",
            "fsx.automaticBackupRetentionDays": 3,
        },
        "fsx.automaticBackupRetentionDays cannot be set: FSx makes no backups of a scratch file system.\nRemove them.",
    ),
    (
        "fsx",
        {"fsx.deploymentType": "PERSISTENT_1", "fsx.perUnitStorageThroughput": 50}
        | {"fsx.s3ImportPath": "s3://b/in", "fsx.automaticBackupRetentionDays": 3},
        "fsx.automaticBackupRetentionDays cannot be set: FSx makes no backups of a file system linked to S3.\n"
        "Remove them.",
    ),
    (
        "fsx",
        {"fsx.metadataIops": 1500},
        "fsx.metadataIops=1500 is read only with fsx.metadataConfigurationMode.\n"
        "Set fsx.metadataConfigurationMode=USER_PROVISIONED, or remove fsx.metadataIops.",
    ),
    (
        "fsx-static",
        {"fsx.mountName": None},
        "backend=fsx needs fsx.mountName.\n"
        "Set them to the values of the existing file system, from `aws fsx describe-file-systems`: FileSystemId, "
        "DNSName, LustreConfiguration.MountName, StorageCapacity.",
    ),
    (
        "fsx-static",
        FSX,
        "fsx.volumeHandle=fs-0a names existing storage, but fsx.securityGroupIds, fsx.subnetId would create a new "
        "one.\n"
        "Remove the first key or the others; -f values/storage/fsx-static.yaml, used instead of fsx.yaml, sets none "
        "of the others.",
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
        "storage.mountOptions replaces all mount options of the chart, including nfs.version, nfs.nconnect.\n"
        "Remove storage.mountOptions, or the other keys: --set nfs.version= --set nfs.nconnect=null.",
    ),
    (
        "local",
        {"local.path": "data"},
        "backend=local needs local.path, the absolute path of an existing directory on the node, and local.nodeName, "
        "the node's name (kubectl get nodes).\n"
        "Add --set local.path=/DIRECTORY --set local.nodeName=NODE.",
    ),
]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(("overlay", "settings", "message"), REFUSED)
def test_values_that_the_provider_would_refuse_are_refused(
    overlay: str, settings: dict[str, Any], message: str, program: str
) -> None:
    assert refusal(overlay, program=program, **settings) == message


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
def test_the_schema_refuses_values_that_no_driver_accepts(settings: dict[str, str]) -> None:
    done = template("existing", **settings)
    assert done.returncode != 0
    (key,) = settings
    assert f"/{key.replace('.', '/')}" in done.stderr or f"'{key.rpartition('.')[2]}' not allowed" in done.stderr


def test_the_schema_requires_the_keys_of_every_back_end() -> None:
    assert "missing property 'pvc'" in template("blob", pvc="null").stderr
