"""Samples of a bucket behind 50 ms of latency, against the same pair on the local disk.

The tool, `buckets.py SOURCE BATCHES STEP`, prints as JSON the seconds to open the source, to the first batch, and of
the other batches, each of which a training step of STEP seconds follows. The server is `tests.support.object_server`.
"""

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .mill import Setting
    from .report import Section

SEQ_LENGTH, BATCH, SEED = 2048, 8, 1234
LATENCY = 0.05
DOCUMENTS, MEAN = 400_000, 500
BATCHES = 1_000
STEP = BATCH * SEQ_LENGTH / 1_000_000
"""Seconds of a training step of a node that trains a million tokens in a second."""


def read(source: str, batches: str, step: str) -> dict[str, float | str]:
    """Read batches, each before a step."""
    import tokenmill.data

    started = time.perf_counter()
    samples = tokenmill.data.open(source, seq_length=SEQ_LENGTH, seed=SEED)
    opened = time.perf_counter()
    samples.batch(range(BATCH))
    first = begun = time.perf_counter()
    digest = hashlib.sha256()
    steps = iter(range(1, int(batches)))
    with ThreadPoolExecutor(1) as reader:  # two batches ahead, as tokenmill.loaders.torch reads
        pending = deque(reader.submit(read_batch, samples, number) for number in islice(steps, 2))
        while pending:
            digest.update(pending.popleft().result()[:, ::64].tobytes())
            pending.extend(reader.submit(read_batch, samples, number) for number in islice(steps, 1))
            time.sleep(float(step))
    seconds = time.perf_counter() - begun
    return {
        "open_seconds": opened - started,
        "first_seconds": first - opened,
        "seconds": seconds,
        "hash": digest.hexdigest(),
    }


def read_batch(samples: Any, number: int) -> Any:
    """Return the tokens of a batch."""
    return samples.batch(np.arange(number * BATCH, (number + 1) * BATCH)).tokens


def section(s: "Setting") -> "Section":
    """Compare the samples of a bucket with those of a file."""
    from ..support.object_server import serve_objects
    from .corpora import HERE, require_space
    from .measure import MB, Failed, Run, run
    from .reading import tool
    from .report import Figure, Section, ratios

    require_space(s.scratch, 2_000 * MB)
    run(tool(sys.executable, "write", s.scratch / "objects/pair", s.size(DOCUMENTS, 20_000), MEAN))
    batches = s.size(BATCHES, 50)
    (s.scratch / "tmp").mkdir()
    with serve_objects(s.scratch / "objects", LATENCY) as server:
        address = f"s3://{s.scratch.name}/pair"

        def measure(source: str, step: float, cache: int = 64 * MB) -> Run:
            directory = s.fresh("tmp")
            directory.mkdir(exist_ok=True)
            env = server.environment | {"TOKENMILL_BUCKET_CACHE_BYTES": str(cache), "TMPDIR": str(directory)}
            env |= {"PYTHONPATH": str(HERE.parents[1] / "jobs")}
            return run([sys.executable, HERE / "buckets.py", source, str(batches), str(step)], cpus=s.one_cpu, env=env)

        local = str(s.scratch / "objects/pair")
        sides: dict[str, Callable[[], Run]] = {
            "disk, with steps": partial(measure, local, STEP),
            "bucket, with steps": partial(measure, address, STEP),
            "disk": partial(measure, local, 0.0),
            "bucket": partial(measure, address, 0.0),
            "bucket, in the cache": partial(measure, address, 0.0, 4_000 * MB),
        }
        runs = s.in_rounds(sides)
        server.take_counts()
        measure(address, 0.0)
        sent = server.take_counts()
    results = {name: [done.result for done in side] for name, side in runs.items()}
    if len({result["hash"] for side in results.values() for result in side}) > 1:
        raise Failed("the bucket has other samples than the disk")

    def column(name: str, field: str) -> list[float]:
        return [result[field] for result in results[name]]

    done = Section(f"buckets: {batches:,} batches of {BATCH} samples, {1000 * LATENCY:.0f} ms to the store, one CPU")
    add = done.figures.append
    paced = ratios(column("disk, with steps", "seconds"), column("bucket, with steps", "seconds"))
    add(Figure("tokens/s at a million tokens/s, bucket", "local disk", paced, least=0.9))
    add(Figure("opened to first batch, bucket", "", column("bucket", "first_seconds"), "s", most=2.0))
    for name in ("bucket", "bucket, in the cache"):
        rates = ratios(column("disk", "seconds"), column(name, "seconds"))
        add(Figure(f"tokens/s without steps, {name}", "local disk", rates))
    add(Figure("open, bucket", "", column("bucket", "open_seconds"), "s"))
    add(
        Figure(
            "bytes fetched for a byte of a sample", "", [sent.bytes / (batches * BATCH * SEQ_LENGTH * 2)], "times", 3
        )
    )
    done.add_runs(runs)
    return done


if __name__ == "__main__":
    print(json.dumps(read(*sys.argv[1:])))
