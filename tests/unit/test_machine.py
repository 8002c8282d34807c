"""Limits of a container, read from the files of cgroup v2 and v1."""

from pathlib import Path

import pytest

from tokenmill.core.machine import cpu_quota, memory_limit

FILES = {
    "v2": {"memory.max": "2147483648\n", "cpu.max": "150000 100000\n"},
    "v2, no limits": {"memory.max": "max\n", "cpu.max": "max 100000\n"},
    "v1": {
        "memory/memory.limit_in_bytes": "2147483648\n",
        "cpu/cpu.cfs_quota_us": "150000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    },
    "v1, no limits": {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    },
    "no cgroup": {},
    "garbage": {"memory.max": "\n", "cpu.max": "100000\n"},
}


@pytest.mark.parametrize(
    ("kind", "memory", "cpus"),
    [(kind, *((1 << 31, 1.5) if kind in ("v1", "v2") else (None, None))) for kind in FILES],
)
def test_limits_are_read_from_both_versions(tmp_path: Path, kind: str, memory: int | None, cpus: float | None) -> None:
    for name, content in FILES[kind].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert (memory_limit(tmp_path), cpu_quota(tmp_path)) == (memory, cpus)
