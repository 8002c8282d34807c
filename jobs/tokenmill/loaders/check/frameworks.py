"""The frameworks whose samples are compared: the registry, their processes, and the comparison.

A framework is one entry of FRAMEWORKS and one function of `framework_readers`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.printing import printable
from tokenmill.core.redaction import SECRET_NAME
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.loaders.check import framework_readers as readers
from tokenmill.loaders.check.framework_records import (
    REQUEST,
    RESPONSE,
    FrameworkPart,
    FrameworkRequest,
    FrameworkResponse,
)
from tokenmill.loaders.check.request import CheckedSource, CheckRequest
from tokenmill.loaders.check.rows import CheckRow, Result
from tokenmill.samples.samples import Samples

TIMEOUT_SECONDS = 300.0

PROGRESS_SECONDS = 30.0

MAX_MESSAGE = 300
"""Characters of a framework's last line that a row shows."""

EVERY_KIND = ("pairs", "packed", "synthetic")


@dataclass(frozen=True, kw_only=True)
class SampleReader:
    """A framework whose samples can be compared.

    Attributes:
        read: reads its samples.
        modules: the modules that must be installed.
        distribution: the package whose version is shown.
        remedy: how to install it, as a clause.
        kinds: the kinds of sources that it reads.
        options: whether its configuration has a pad and a key.
    """

    read: readers.Reader
    modules: tuple[str, ...]
    distribution: str
    remedy: str
    kinds: tuple[str, ...] = EVERY_KIND
    options: bool = True


FRAMEWORKS: dict[str, SampleReader] = {
    "megatron-core": SampleReader(
        read=readers.read_megatron_core,
        modules=("megatron.core", "torch"),
        distribution="megatron-core",
        remedy="run pip install megatron-core torch",
        kinds=("pairs",),
    ),
    "automodel": SampleReader(
        read=readers.read_automodel,
        modules=("nemo_automodel", "torch"),
        distribution="nemo-automodel",
        remedy="run pip install nemo-automodel",
        kinds=("pairs",),
    ),
    "torch": SampleReader(
        read=readers.read_torch,
        modules=("torch",),
        distribution="torch",
        remedy="run pip install '.[torch]' in the clone of tokenmill",
    ),
    "transformers": SampleReader(
        read=readers.read_transformers,
        modules=("transformers", "accelerate", "torch"),
        distribution="transformers",
        remedy="run pip install '.[hf]' in the clone of tokenmill",
    ),
    "lightning": SampleReader(
        read=readers.read_lightning,
        modules=("lightning", "torch"),
        distribution="lightning",
        remedy="run pip install '.[lightning]' in the clone of tokenmill",
    ),
    "torchtitan": SampleReader(
        read=readers.read_torchtitan,
        modules=("torchtitan", "torch"),
        distribution="torchtitan",
        remedy="run pip install torchtitan",
        options=False,
    ),
    "deepspeed": SampleReader(
        read=readers.read_deepspeed,
        modules=("deepspeed", "torch"),
        distribution="deepspeed",
        remedy="run pip install '.[deepspeed]' in the clone of tokenmill",
    ),
    "grain": SampleReader(
        read=readers.read_grain,
        modules=("grain",),
        distribution="grain",
        remedy="run pip install '.[grain]' in the clone of tokenmill",
    ),
    "megatron-bridge": SampleReader(
        read=readers.read_megatron_bridge,
        modules=("megatron.bridge", "transformer_engine", "torch"),
        distribution="megatron-bridge",
        remedy="use an NGC image with Megatron-Bridge and Transformer Engine",
        kinds=("pairs",),
    ),
}
"""The frameworks by name, in the order of the report."""


def choose_frameworks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the frameworks of --framework in the order of the registry; `all` is every one.

    Raises:
        RequestError: a name is unknown, or a framework that is named is not installed.
    """
    unknown = [name for name in names if name not in FRAMEWORKS and name != "all"]
    if unknown:
        raise RequestError(f"unknown framework {unknown[0]!r}; choose one of all, {', '.join(FRAMEWORKS)}")
    for name in names:
        if name != "all" and (missing := find_missing(FRAMEWORKS[name])):
            raise RequestError(
                f"--framework {name}: {missing} is not installed in {sys.executable}; {FRAMEWORKS[name].remedy}"
            )
    if "all" in names and all(map(find_missing, FRAMEWORKS.values())):
        raise RequestError(
            f"--framework all: no framework is installed in {sys.executable}; run pip install '.[torch]' in the clone "
            "of tokenmill, or use the Python of the training program"
        )
    return tuple(name for name in FRAMEWORKS if name in names or "all" in names)


def find_missing(framework: SampleReader) -> str | None:
    """Return the first module of a framework that is not installed; nothing is imported."""
    for name in framework.modules:
        package, _, rest = name.partition(".")
        spec = find_spec(package)
        if spec is None:
            return name
        # find_spec("megatron.core") would import the package above it.
        if rest and not any((Path(place) / rest).is_dir() for place in spec.submodule_search_locations or []):
            return name
    return None


def read_reference(samples: Samples, count: int) -> Iterator[tuple[readers.Array, readers.Array]]:
    """Yield the first samples as `tokenmill.data` reads them."""
    for number in range(count):
        batch = samples.batch(np.array([number]))
        yield batch.tokens, batch.masked_labels()


def compare_digests(reference: Sequence[str], digests: Sequence[str]) -> str | None:
    """Return how the samples of a framework differ from the reference, or None."""
    for number, (expected, digest) in enumerate(zip(reference, digests, strict=False)):
        if expected != digest:
            equal = sum(map(str.__eq__, reference, digests))
            return f"sample {number} is the first that differs; {equal:,} of {len(reference):,} samples are equal"
    if len(digests) != len(reference):
        return f"it has {len(digests):,} samples, not {len(reference):,}"
    return None


def check_frameworks(
    request: CheckRequest, source: CheckedSource, eod: int | None, log: Callable[[str], None]
) -> list[CheckRow]:
    """Return a row for each framework and part."""
    rows: list[CheckRow] = []
    if not request.frameworks:
        return rows
    parts = [
        FrameworkPart(
            name=part.name,
            requested=part.requested,
            count=min(request.count, part.requested or request.count, len(part.samples)),
        )
        for part in source.parts
    ]
    references = {
        part.name: readers.digest_samples(read_reference(checked.samples, part.count), part.count)
        for part, checked in zip(parts, source.parts, strict=True)
    }
    for name in request.frameworks:
        order = FrameworkRequest(
            framework=name,
            source=request.path,
            split=request.split,
            key=request.key,
            seq_length=request.seq_length,
            seed=request.seed,
            pad=request.pad,
            eod=eod,
            parts=tuple(parts),
        )
        rows += check_framework(name, FRAMEWORKS[name], order, source.kind, references, log)
    return rows


def check_framework(
    name: str,
    framework: SampleReader,
    request: FrameworkRequest,
    kind: str,
    references: dict[str, list[str]],
    log: Callable[[str], None],
) -> list[CheckRow]:
    """Return the rows of a framework: one for each part, or one if it cannot be compared."""
    if kind not in framework.kinds:
        return [CheckRow(name, "not checked", f"it does not read {_KINDS[kind]}")]
    if missing := find_missing(framework):
        return [CheckRow(name, "not checked", f"{missing} is not installed; {framework.remedy}")]
    if not framework.options and (request.pad is not None or request.key is not None):
        return [CheckRow(name, "not checked", "its loader has no options for --pad and --key")]
    response = run_framework(framework, request, log)
    title = f"{name} {_get_version(framework)}".strip()
    if isinstance(response, str):
        return [CheckRow(title, "failed", response)]
    rows = []
    for part, reference in references.items():
        if part in response.refused:
            rows.append(CheckRow(f"{title}, {part}", "not checked", response.refused[part]))
            continue
        difference = compare_digests(reference, response.digests.get(part, []))
        result: Result = "differs" if difference else "equal"
        detail = difference or f"the first {len(reference):,} samples"
        rows.append(CheckRow(f"{title}, {part}", result, detail))
    return rows


_KINDS = {"pairs": "pairs", "packed": "the rows of a pack", "synthetic": "SYNTHETIC tokens"}


def _get_version(framework: SampleReader) -> str:
    try:
        return version(framework.distribution)
    except PackageNotFoundError:
        return ""


def run_framework(
    framework: SampleReader, request: FrameworkRequest, log: Callable[[str], None]
) -> FrameworkResponse | str:
    """Read samples in a process of their framework; return their digests, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-check-") as path:
        directory = Path(path)
        (directory / REQUEST).write_bytes(msgspec.json.encode(request))
        reader = f"{framework.read.__module__}:{framework.read.__qualname__}"
        command = [sys.executable, "-P", "-m", "tokenmill.loaders.check.framework_child", reader, path]
        with (directory / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
            try:
                ended = _wait(
                    process,
                    TIMEOUT_SECONDS,
                    lambda seconds: log(f"still reading with {request.framework} after {seconds:.0f} s"),
                )
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its children too, such as a compiler
                    process.wait()
        last_line = _read_last_line(directory / "output")
        if not ended:
            return f"it did not finish within {TIMEOUT_SECONDS:.0f} s; its last line: {last_line or 'none'}"
        if process.returncode:
            reason = last_line or "it printed nothing"
            signal_name = f"signal {-process.returncode}: " if process.returncode < 0 else ""
            return f"{signal_name}{reason}"
        try:
            return decode_json((directory / RESPONSE).read_bytes(), FrameworkResponse)
        except (OSError, msgspec.DecodeError):
            return f"it wrote no digests; its last line: {last_line or 'none'}"


_LAUNCHER = re.compile(
    "(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|MASTER_ADDR|MASTER_PORT)$"
    "|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|ACCELERATE)_"
)
"""Variables with which a launcher makes a framework wait for other ranks."""


def _environment() -> dict[str, str]:
    """Return the environment of a framework's process: no secrets, other ranks, network or GPU; this package first."""
    variables = {
        name: value for name, value in os.environ.items() if not SECRET_NAME.search(name) and not _LAUNCHER.match(name)
    }
    package = str(Path(__file__).parents[3])
    search = [package, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    return variables | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(search)),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _wait(process: "subprocess.Popen[bytes]", timeout: float, report: Callable[[float], None]) -> bool:
    """Wait for a process; return whether it ended before the timeout."""
    start = time.monotonic()
    while (left := start + timeout - time.monotonic()) > 0:
        try:
            process.wait(min(left, PROGRESS_SECONDS))
            return True
        except subprocess.TimeoutExpired:
            report(time.monotonic() - start)
    return process.poll() is not None


def _read_last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return printable(text, MAX_MESSAGE)
