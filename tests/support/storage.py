"""The values that a user must add to the overlays of charts/shared-storage, and the options of the guides."""

from typing import Any

SKU = "AMLFS-Durable-Premium-125"
FSX = {"fsx.subnetId": "subnet-0a", "fsx.securityGroupIds": "{sg-0a}"}
NEEDED: dict[str, dict[str, Any]] = {
    "amlfs": {},
    "amlfs-static": {"amlfs.mgsIpAddress": "10.1.0.4", "amlfs.storageCapacityTiB": 48},
    "blob": {},
    "blob-nfs": {},
    "blob-static": {"blob.storageAccount": "corpora", "blob.containerName": "slimpajama", "blob.secretName": "key"},
    "existing": {},
    "fsx": FSX,
    "fsx-static": {"fsx.volumeHandle": "fs-0a", "fsx.dnsName": "fs-0a.fsx", "fsx.mountName": "m"}
    | {"fsx.storageCapacityGiB": 2400},
    "local": {"local.path": "/mnt/data", "local.nodeName": "node-1"},
    "nfs": {"nfs.server": "server", "nfs.path": "/export"},
}
"""The values that a user must add to each overlay."""
GUIDE_AMLFS = ("--set", f"amlfs.skuName={SKU}", "--set", "amlfs.storageCapacityTiB=16")
GUIDE_BLOB = (
    "--set-json",
    'storage.mountOptions=["-o allow_other","--use-attr-cache=true","--cancel-list-on-mount-seconds=10",'
    '"-o attr_timeout=120","-o entry_timeout=120","-o negative_timeout=120","--log-level=LOG_WARNING",'
    '"--file-cache-timeout-in-seconds=120","--block-cache","--block-cache-block-size=32",'
    '"--block-cache-parallelism=80"]',
)
"""The options of the AKS guide."""
