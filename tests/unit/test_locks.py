"""The images' locks can be installed on linux/amd64 and linux/arm64, from wheels alone.

locks/wheels.txt, which `make locks` writes, has the file name of each hash. These tests need no network.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

LOCKS = Path(__file__).parents[2] / "locks"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
ANY_PYTHON = (11, 12, 13, 14)
PYTHONS = {"runtime": ANY_PYTHON, "jobs": ANY_PYTHON, "training": ANY_PYTHON, "trainer": (12,)}
"""The minor versions that install a lock. Only the Python of NVIDIA's image, 3.12, installs the trainer's."""
GLIBC = {"trainer": 39}
"""The glibc of the images that install a lock: that of NVIDIA's image for the trainer, else 2.28 of the wheels."""
FALLBACKS: dict[str, str] = {}
"""Packages that a marker excludes on arm64, with the package or the code of tokenmill that replaces each."""


class Pin(NamedTuple):
    requirement: Requirement
    hashes: frozenset[str]

    @property
    def version(self) -> str:
        """Return `name==version`."""
        return f"{canonicalize_name(self.requirement.name)}{self.requirement.specifier}"

    def applies_to(self, machine: str, minor: int) -> bool:
        """Return whether pip installs the package with CPython 3.<minor> of a Linux machine."""
        environment = {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"3.{minor}.0",
            "python_version": f"3.{minor}",
            "sys_platform": "linux",
        }
        return self.requirement.marker is None or self.requirement.marker.evaluate(environment)


@cache
def pins(lock: str) -> list[Pin]:
    entries = re.findall(r"^(\S[^\\]*)\\\n((?: +--hash=.*\n)+)", (LOCKS / f"{lock}.txt").read_text(), re.MULTILINE)
    return [Pin(Requirement(line), frozenset(re.findall("sha256:([0-9a-f]+)", hashes))) for line, hashes in entries]


@cache
def wheels() -> dict[str, list[tuple[str, frozenset[Tag]]]]:
    """Return the hash and the tags of each wheel, by `name==version`."""
    result: dict[str, list[tuple[str, frozenset[Tag]]]] = {}
    for line in (LOCKS / "wheels.txt").read_text().splitlines():
        digest, file = line.split()
        name, version, _, tags = parse_wheel_filename(file)
        result.setdefault(f"{name}=={version}", []).append((digest, tags))
    return result


@cache
def supported(machine: str, minor: int, glibc: int) -> frozenset[Tag]:
    platforms = [f"manylinux_2_{version}_{machine}" for version in range(17, glibc + 1)]
    platforms += [f"manylinux2014_{machine}"]
    python = (3, minor)
    specific = cpython_tags(python, platforms=platforms)
    return frozenset([*specific, *compatible_tags(python, f"cp3{minor}", platforms)])


@pytest.mark.parametrize("architecture", MACHINES)
@pytest.mark.parametrize("lock", PYTHONS)
def test_each_package_has_a_wheel_whose_hash_is_in_the_lock(lock: str, architecture: str) -> None:
    machine = MACHINES[architecture]
    missing = []
    for minor in PYTHONS[lock]:
        tags = supported(machine, minor, GLIBC.get(lock, 28))
        for pin in [pin for pin in pins(lock) if pin.applies_to(machine, minor)]:
            fitting = {digest for digest, has in wheels().get(pin.version, []) if has & tags}
            if not fitting & pin.hashes:
                missing.append(f"{pin.version} on Python 3.{minor}")
    assert pins(lock)
    assert not missing, (
        f"no wheel for linux/{architecture}: {missing}. If the lock changed, run make locks. Else pin another version, "
        "or exclude the package with a marker in pyproject.toml and name its fallback in FALLBACKS"
    )


def test_a_package_that_arm64_lacks_has_a_fallback() -> None:
    excluded = {
        pin.requirement.name
        for lock, minors in PYTHONS.items()
        for minor in minors
        for pin in pins(lock)
        if pin.applies_to("x86_64", minor) and not pin.applies_to("aarch64", minor)
    }
    assert excluded == set(FALLBACKS)


def test_the_record_of_wheels_has_no_package_that_is_not_pinned() -> None:
    assert set(wheels()) == {pin.version for lock in PYTHONS for pin in pins(lock)}
