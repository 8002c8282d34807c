"""Bytes that move: extract, concatenate, download, and the bytes that fused preprocessing writes."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from .corpora import Corpus, require_space, shaped
from .encoding import sha256
from .measure import MB, Failed, Run, run
from .mill import Setting, data_bytes, undo
from .report import Figure, Section, ratios

CONNECTIONS = 8
MEMORY = "/dev/shm"
DATASET = "bench/corpus"


def extract(s: Setting) -> Section:
    """Time extract, compared with `zstd -d` and a sync of its output."""
    compressed, output, reference = s.large.input, s.scratch / "extracted", s.scratch / "zstd.jsonl"

    def zstd() -> Run:
        reference.unlink(missing_ok=True)
        return run(["sh", "-c", 'zstd -q -d "$0" -o "$1" && sync "$1"', compressed, reference], cpus=s.cpus)

    require_space(s.scratch, 2 * s.large.about["jsonl_bytes"])
    runs = s.in_rounds({"extract": lambda: s.mill("extract", compressed, s.fresh(output.name)), "zstd -d": zstd})
    same_bytes(sorted(output.glob("*.jsonl")), reference)
    section = Section(f"extract, {s.large.megabytes:.0f} MB of text in one .jsonl.zst")
    ratio = ratios(runs["zstd -d"], runs["extract"])
    section.figures.append(Figure("extract, hash and counts included", "`zstd -d`, then fsync", ratio, least=0.9))
    section.add_runs(runs, s.large.about["jsonl_bytes"] / MB)
    return section


def concatenate(s: Setting) -> Section:
    """Time concatenate, compared with `cat` and a sync: files of extract, and files without receipts."""
    size = s.size(4000, 20)
    corpus = shaped(s.scratch, "pieces", s.large, size, 3 * size * MB)
    extracted, output, reference = s.fresh("extracted"), s.scratch / "concatenated", s.scratch / "cat.jsonl"
    s.mill("extract", corpus.input, extracted)
    files = sorted(corpus.input.iterdir())

    def cat() -> Run:
        reference.unlink(missing_ok=True)
        return run(["sh", "-c", 'out="$0"; cat "$@" > "$out" && sync "$out"', reference, *files], cpus=s.cpus)

    def join(source: Path) -> Run:
        return s.mill("concatenate", source, s.fresh(output.name), "--target-files", "1")

    runs = s.in_rounds(
        {"of extract's": partial(join, extracted), "cat": cat, "of brought files": partial(join, corpus.input)}
    )
    same_bytes(sorted(output.glob("*.jsonl")), reference)
    section = Section(f"concatenate, {size / 1000:g} GB in {len(files)} files into one")
    section.figures += [
        Figure(
            f"concatenate, receipts included, {label}", "`cat`, then fsync", ratios(runs["cat"], runs[side]), least=0.85
        )
        for side, label in (("of extract's", "after extract"), ("of brought files", "files with no receipts"))
    ]
    section.add_runs(runs, sum(path.stat().st_size for path in files) / MB)
    return section


def download(s: Setting) -> Section:
    """Time download, compared with curl, both from the same server on this machine."""
    size = s.size(4000, 20)
    corpus = shaped(s.scratch, "pieces", s.large, size, 3 * size * MB)
    served = sorted(corpus.input.iterdir())
    output, reference = s.scratch / "downloaded", s.scratch / "curled"
    with hub(s, served) as endpoint:
        config = s.fresh("curl.conf")
        config.write_text(
            "".join(
                f'url = "{endpoint}/datasets/{DATASET}/resolve/main/{p.name}"\noutput = "{p.name}"\n' for p in served
            )
        )
        curl = (
            f'cd "$0" && curl --parallel --parallel-max {CONNECTIONS} --location --fail --silent --show-error -K "$1"'
        )

        def fetch(then: str = "") -> Run:
            s.fresh(reference.name).mkdir()
            return run(["sh", "-c", curl + then, reference.resolve(), config.resolve()], cpus=s.cpus)

        def mill() -> Run:
            options = ("--endpoint", endpoint, "--connections", str(CONNECTIONS))
            return s.mill("download", f"hf://datasets/{DATASET}", s.fresh(output.name), *options)

        runs = s.in_rounds(
            {
                "download": mill,
                "curl": fetch,
                "curl, sync": partial(fetch, " && sync *"),
                "curl, sha256sum, sync": partial(fetch, " && sha256sum * > sums && rm sums && sync *"),
            }
        )
    for directory in (output, reference):
        for path in served:
            if sha256(directory / path.name) != sha256(path):
                raise Failed(f"{directory / path.name} differs from the file on the server")
    section = Section(f"download, {size / 1000:g} GB in {len(served)} files from a server on the same CPUs")
    label = f"wall time of download, sha256 and fsync included, {CONNECTIONS} connections"
    section.figures += [
        # As with `zstd -d` and `cat`: both sides end when their files are on the disk.
        Figure(
            label, "`curl --parallel`, then fsync", ratios(runs["download"], runs["curl, sync"]), "of it", most=1.15
        ),
        *(
            Figure(label, f"of {side}", ratios(runs["download"], runs[side]), "of it")
            for side in ("curl", "curl, sha256sum, sync")
        ),
    ]
    section.add_runs(runs, sum(path.stat().st_size for path in served) / MB)
    rate = section.runs["curl"]["mb_per_second"]["median"]
    section.notes.append(f"The server shares the CPUs; curl had {rate:,.0f} MB/s from it.")
    return section


@contextlib.contextmanager
def hub(s: Setting, files: Sequence[Path]) -> Iterator[str]:
    """Serve files as a dataset of a Hub on this machine; yield its address."""
    folder = s.fresh("hub")
    (folder / "datasets" / DATASET).mkdir(parents=True)
    for path in files:
        os.link(path, folder / "datasets" / DATASET / path.name)
    command = [sys.executable, "-m", "support.hub", str(folder)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            line = server.stdout.readline().strip()
            if not line:
                raise Failed("the test Hub did not start")
            yield line.removeprefix("HF_ENDPOINT=")
        finally:
            server.terminate()


def fused(s: Setting) -> Section:
    """Count the bytes written to shared storage from a Hub to .bin/.idx: streamed, and stage by stage.

    The output is on a disk, and scratch is in memory. The kernel counts for each process of the tree the bytes that it
    made the disk's file system write (`ru_oublock`).
    """
    tokenizer = "llama3_1"
    if s.scratch.stat().st_dev == os.stat(MEMORY).st_dev:
        raise Failed(f"{s.scratch} is not on a disk; choose another directory with --cache")
    corpus = s.large
    require_space(s.scratch, 5 * corpus.about["jsonl_bytes"])
    shards = split(s, corpus, s.size(16, 4))
    uri, data = f"hf://datasets/{DATASET}", s.scratch / "data"
    with hub(s, shards) as endpoint:
        options = ("--endpoint", endpoint)
        recipe = ("--tokenizer", s.tokenizers / tokenizer)
        scratch = Path(MEMORY, f"tokenmill-bench-{os.getpid()}")
        streamed, env = ("--scratch", scratch), {"TMPDIR": MEMORY}

        def stages() -> Run:
            data, done = s.fresh("data"), []
            done.append(s.mill("download", uri, data, *options))
            done.append(s.mill("extract", data, data / "extracted"))
            done.append(s.mill("concatenate", data, data / "concatenated", "--target-files", "4"))
            done.append(s.mill("preprocess", data, data / "preprocessed", *recipe, env=env))
            return Run(
                seconds=sum(run.seconds for run in done),
                cpu_seconds=sum(run.cpu_seconds for run in done),
                peak_bytes=max(run.peak_bytes for run in done),
                written_bytes=sum(run.written_bytes for run in done),
                output=done[-1].output,
            )

        def first_command() -> Run:
            return s.mill("preprocess", uri, s.fresh("fused"), *options, *recipe, *streamed, env=env)

        planned = s.planned(tokenizer, uri, "planned", *options, *streamed)

        def worker() -> Run:
            undo(planned)
            return s.mill("preprocess", uri, planned, *options, *recipe, *streamed, env=env)

        sides: dict[str, Callable[[], Run]] = {
            "fused worker": worker,
            "fused, first command": first_command,
            "by stages": stages,
        }
        try:
            runs = s.in_rounds(sides)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    outputs = (planned, s.scratch / "fused", data / "preprocessed")
    sizes = dict(zip(sides, map(data_bytes, outputs), strict=True))
    tokens = {name: results[0].result["counts"]["tokens"] for name, results in runs.items()}
    if len(set(tokens.values())) != 1:
        raise Failed(f"not the same tokens: {tokens}")
    section = Section(
        f"bytes written from a Hub to .bin/.idx, {corpus.megabytes:.0f} MB of text in {len(shards)} shards"
    )
    written, against = {}, "for each byte of .bin/.idx"
    for name, done in runs.items():
        written[name] = [run.written_bytes / sizes[name] for run in done]
    written_label = "bytes written to shared storage, fused"
    section.figures += [
        Figure(written_label, against, written["fused worker"], "bytes", 3, most=1.02),
        Figure(f"{written_label}, planning included", against, written["fused, first command"], "bytes", 3),
        Figure("by download, extract, concatenate, preprocess", against, written["by stages"], "bytes"),
    ]
    section.add_runs(runs, corpus.megabytes)
    return section


def split(s: Setting, corpus: Corpus, count: int) -> list[Path]:
    """Cut a corpus into compressed shards of complete lines."""
    folder = s.fresh("shards")
    folder.mkdir(parents=True)
    parts = [folder / f"shard-{number:03d}.jsonl" for number in range(count)]
    cut = ("--numeric-suffixes", "--suffix-length=3", "--additional-suffix=.jsonl")
    run(["split", f"--number=l/{count}", *cut, corpus.plain, folder / "shard-"])
    run(["zstd", "-q", "--rm", *parts])
    return [Path(f"{path}.zst") for path in parts]


def same_bytes(output: Sequence[Path], reference: Path) -> None:
    """Raise Failed for outputs that differ."""
    if len(output) != 1 or sha256(output[0]) != sha256(reference):
        raise Failed(f"other bytes: {', '.join(map(str, output))} and {reference}")
