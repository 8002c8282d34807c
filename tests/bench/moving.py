"""Bytes from place to place: extract, concatenate, download, and what fused preprocessing writes."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from .corpora import Corpus, need, shaped
from .encoding import sha256
from .measure import MB, Failed, Run, run
from .mill import Setting, data_bytes, undo
from .report import Figure, Section, ratios

CONNECTIONS = 8
MEMORY = "/dev/shm"
DATASET = "bench/corpus"


def extract(s: Setting) -> Section:
    """Time extract beside `zstd -d` and a sync of its output."""
    packed, ours, theirs = s.large.given, s.scratch / "extracted", s.scratch / "zstd.jsonl"

    def zstd() -> Run:
        theirs.unlink(missing_ok=True)
        return run(["sh", "-c", 'zstd -q -d "$0" -o "$1" && sync "$1"', packed, theirs], cpus=s.cpus)

    need(s.scratch, 2 * s.large.about["jsonl_bytes"])
    runs = s.in_rounds({"extract": lambda: s.mill("extract", packed, s.fresh(ours.name)), "zstd -d": zstd})
    same_bytes(sorted(ours.glob("*.jsonl")), theirs)
    section = Section(f"extract, {s.large.megabytes:.0f} MB of text in one .jsonl.zst")
    ratio = ratios(runs["zstd -d"], runs["extract"])
    section.figures.append(Figure("extract, hash and counts included", "`zstd -d`, then fsync", ratio, least=0.9))
    section.add_runs(runs, s.large.about["jsonl_bytes"] / MB)
    return section


def concatenate(s: Setting) -> Section:
    """Time concatenate beside `cat` and a sync of its output: files that extract made, and files just brought."""
    size = s.size(4000, 20)
    corpus = shaped(s.scratch, "pieces", s.large, size, 3 * size * MB)
    extracted, ours, theirs = s.fresh("extracted"), s.scratch / "concatenated", s.scratch / "cat.jsonl"
    s.mill("extract", corpus.given, extracted)
    brought = sorted(corpus.given.iterdir())

    def cat() -> Run:
        theirs.unlink(missing_ok=True)
        return run(["sh", "-c", 'out="$0"; cat "$@" > "$out" && sync "$out"', theirs, *brought], cpus=s.cpus)

    def join(source: Path) -> Run:
        return s.mill("concatenate", source, s.fresh(ours.name), "--target-files", "1")

    runs = s.in_rounds(
        {"of extract's": partial(join, extracted), "cat": cat, "of brought files": partial(join, corpus.given)}
    )
    same_bytes(sorted(ours.glob("*.jsonl")), theirs)
    section = Section(f"concatenate, {size / 1000:g} GB in {len(brought)} files into one")
    section.figures += [
        Figure(
            f"concatenate, receipts included, {what}", "`cat`, then fsync", ratios(runs["cat"], runs[side]), least=0.85
        )
        for side, what in (("of extract's", "after extract"), ("of brought files", "files with no receipts"))
    ]
    section.add_runs(runs, sum(path.stat().st_size for path in brought) / MB)
    return section


def download(s: Setting) -> Section:
    """Time download beside curl, both from the same server on this machine."""
    size = s.size(4000, 20)
    corpus = shaped(s.scratch, "pieces", s.large, size, 3 * size * MB)
    served = sorted(corpus.given.iterdir())
    ours, theirs = s.scratch / "downloaded", s.scratch / "curled"
    with hub(s, served) as endpoint:
        wanted = s.fresh("curl.conf")
        wanted.write_text(
            "".join(
                f'url = "{endpoint}/datasets/{DATASET}/resolve/main/{p.name}"\noutput = "{p.name}"\n' for p in served
            )
        )
        curl = (
            f'cd "$0" && curl --parallel --parallel-max {CONNECTIONS} --location --fail --silent --show-error -K "$1"'
        )

        def fetch(then: str = "") -> Run:
            s.fresh(theirs.name).mkdir()
            return run(["sh", "-c", curl + then, theirs.resolve(), wanted.resolve()], cpus=s.cpus)

        def mill() -> Run:
            options = ("--endpoint", endpoint, "--connections", str(CONNECTIONS))
            return s.mill("download", f"hf://datasets/{DATASET}", s.fresh(ours.name), *options)

        runs = s.in_rounds(
            {
                "download": mill,
                "curl": fetch,
                "curl, sync": partial(fetch, " && sync *"),
                "curl, sha256sum, sync": partial(fetch, " && sha256sum * > sums && rm sums && sync *"),
            }
        )
    for directory in (ours, theirs):
        for path in served:
            if sha256(directory / path.name) != sha256(path):
                raise Failed(f"{directory / path.name} is not what was served")
    section = Section(f"download, {size / 1000:g} GB in {len(served)} files from a server on the same CPUs")
    what = f"wall time of download, sha256 and fsync included, {CONNECTIONS} connections"
    section.figures += [
        # As with `zstd -d` and `cat`: both sides end when their files are on the disk.
        Figure(what, "`curl --parallel`, then fsync", ratios(runs["download"], runs["curl, sync"]), "of it", most=1.15),
        *(
            Figure(what, f"of {side}", ratios(runs["download"], runs[side]), "of it")
            for side in ("curl", "curl, sha256sum, sync")
        ),
    ]
    section.add_runs(runs, sum(path.stat().st_size for path in served) / MB)
    rate = section.runs["curl"]["mb_per_second"]["median"]
    section.notes.append(f"The server shares the CPUs; curl had {rate:,.0f} MB/s from it.")
    return section


@contextlib.contextmanager
def hub(s: Setting, files: Sequence[Path]) -> Iterator[str]:
    """Serve files as a dataset on a Hub of this machine; yield its address."""
    folder = s.fresh("hub")
    (folder / "datasets" / DATASET).mkdir(parents=True)
    for path in files:
        os.link(path, folder / "datasets" / DATASET / path.name)
    command = [sys.executable, "-m", "support.hub", str(folder)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            said = server.stdout.readline().strip()
            if not said:
                raise Failed("the test Hub did not start")
            yield said.removeprefix("HF_ENDPOINT=")
        finally:
            server.terminate()


def fused(s: Setting) -> Section:
    """Count what is written to shared storage from a Hub to .bin/.idx: streamed, and stage by stage.

    The output lies on a disk, scratch in memory; the kernel counts for each process the bytes it made the
    disk's file system write (`ru_oublock`), wherever in the tree of processes.
    """
    tokenizer = "llama3_1"
    if s.scratch.stat().st_dev == os.stat(MEMORY).st_dev:
        raise Failed(f"{s.scratch} is no disk; name another directory with --cache")
    corpus = s.large
    need(s.scratch, 5 * corpus.about["jsonl_bytes"])
    shards = split(s, corpus, s.size(16, 4))
    uri, data = f"hf://datasets/{DATASET}", s.scratch / "data"
    with hub(s, shards) as endpoint:
        options = ("--endpoint", endpoint)
        recipe = ("--tokenizer", s.tokenizers / tokenizer)
        own = Path(MEMORY, f"tokenmill-bench-{os.getpid()}")
        streamed, env = ("--scratch", own), {"TMPDIR": MEMORY}

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

        def whole() -> Run:
            return s.mill("preprocess", uri, s.fresh("fused"), *options, *recipe, *streamed, env=env)

        planned = s.planned(tokenizer, uri, "planned", *options, *streamed)

        def worker() -> Run:
            undo(planned)
            return s.mill("preprocess", uri, planned, *options, *recipe, *streamed, env=env)

        sides: dict[str, Callable[[], Run]] = {
            "fused worker": worker,
            "fused, first command": whole,
            "by stages": stages,
        }
        try:
            runs = s.in_rounds(sides)
        finally:
            shutil.rmtree(own, ignore_errors=True)
    outputs = (planned, s.scratch / "fused", data / "preprocessed")
    made = dict(zip(sides, map(data_bytes, outputs), strict=True))
    tokens = {name: of[0].result["counts"]["tokens"] for name, of in runs.items()}
    if len(set(tokens.values())) != 1:
        raise Failed(f"not the same tokens: {tokens}")
    section = Section(
        f"bytes written from a Hub to .bin/.idx, {corpus.megabytes:.0f} MB of text in {len(shards)} shards"
    )
    written, each = {}, "for each byte of .bin/.idx"
    for name, done in runs.items():
        written[name] = [one.written_bytes / made[name] for one in done]
    fused_said = "bytes written to shared storage, fused"
    section.figures += [
        Figure(fused_said, each, written["fused worker"], "bytes", 3, most=1.02),
        Figure(f"{fused_said}, planning included", each, written["fused, first command"], "bytes", 3),
        Figure("by download, extract, concatenate, preprocess", each, written["by stages"], "bytes"),
    ]
    section.add_runs(runs, corpus.megabytes)
    return section


def split(s: Setting, corpus: Corpus, count: int) -> list[Path]:
    """Cut a corpus into compressed shards of whole lines."""
    folder = s.fresh("shards")
    folder.mkdir(parents=True)
    made = [folder / f"shard-{number:03d}.jsonl" for number in range(count)]
    cut = ("--numeric-suffixes", "--suffix-length=3", "--additional-suffix=.jsonl")
    run(["split", f"--number=l/{count}", *cut, corpus.plain, folder / "shard-"])
    run(["zstd", "-q", "--rm", *made])
    return [Path(f"{path}.zst") for path in made]


def same_bytes(ours: Sequence[Path], theirs: Path) -> None:
    """Refuse to compare outputs that differ."""
    if len(ours) != 1 or sha256(ours[0]) != sha256(theirs):
        raise Failed(f"other bytes: {', '.join(map(str, ours))} and {theirs}")
