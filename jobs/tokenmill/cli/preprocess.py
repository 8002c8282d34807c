"""`tokenmill preprocess`: text to Megatron-LM's indexed datasets."""

import time
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli import options as o


def preprocess(
    input: o.InputOrSource,
    output: o.Output = None,
    tokenizer: o.Tokenizer = ...,  # type: ignore[assignment]
    tokenizer_revision: o.TokenizerRevision = None,
    keys: o.Keys = "text",
    append_eod: o.AppendEod = True,
    eod_token: o.EodToken = None,
    special_tokens: o.SpecialTokens = True,
    tokenizer_source: o.TokenizerSource = None,
    special_in_text: o.SpecialInText = "keep",
    target_files: o.TargetFiles = None,
    name: o.Name = "part",
    encoder: o.EncoderName = "auto",
    verify_encoder: o.VerifyEncoder = "start",
    encoder_patience: o.EncoderPatience = 120.0,
    on_bad_record: o.OnBadRecord = "fail",
    max_bad_records: o.MaxBadRecords = 1000,
    format: o.Format = None,
    txt_document: o.TxtDocument = None,
    zstd_window: o.ZstdWindow = None,
    max_record_size: o.MaxRecordSize = None,
    from_stage: o.From = None,
    revision: o.Revision = None,
    include: o.Include = [],  # noqa: B006 - typer copies it
    exclude: o.Exclude = [],  # noqa: B006
    split: o.Split = None,
    sample: o.Sample = None,
    prefer: o.Prefer = None,
    scratch: o.Scratch = None,
    connections: o.Connections = 8,
    deadline: o.Deadline = o.DAY,
    stall_seconds: o.StallSeconds = 60.0,
    endpoint: o.Endpoint = None,
    worker_index: o.WorkerIndex = 0,
    workers: o.Workers = 1,
    processes: o.Processes = None,
    replace: o.Replace = False,
    verify_hashes: o.VerifyHashes = False,
    json: o.Json = False,
) -> None:
    """Tokenise JSONL, compressed or not, Parquet, Arrow, JSON or text into .bin/.idx, as Megatron-LM does."""
    from tokenmill.cli.report import how_to_run, report
    from tokenmill.corpus.source import normalize_source
    from tokenmill.stages import launch
    from tokenmill.tokens.encoder_store import Recipe

    input = normalize_source(input)
    source: Any = Path(input)
    target = output
    choosing = {"--revision": revision, "--sample": sample, "--scratch": scratch}
    selection = o.selection(include, exclude, split, sample, prefer)
    if "://" in input:
        from tokenmill.stages import stream

        give_up_at = time.monotonic() + deadline
        source = stream.Stream(input, revision, selection, endpoint, stall_seconds, give_up_at, connections, scratch)
    elif given := [option for option, value in choosing.items() if value]:
        raise typer.BadParameter(
            f"it is for a source such as hf://datasets/ORG/NAME, and {input} is a path", param_hint=", ".join(given)
        )
    else:
        target = output or launch.default_output(Path(input), "preprocess")
    if target is None:
        raise typer.BadParameter("name the directory to write to; only below a local input is there a default")
    how = how_to_run(worker_index, workers, processes, replace, verify_hashes, json)
    recipe = Recipe(
        tokenizer,
        tokenizer_revision,
        keys.split(","),
        append_eod,
        eod_token,
        special_tokens,
        target_files,
        name,
        tokenizer_source and o.one_of("--tokenizer-source", tokenizer_source, "file", "class"),
        o.one_of("--special-in-text", special_in_text, "keep", "split", "fail"),
        o.reading(format, txt_document, zstd_window),
    )
    summary = launch.preprocess(
        source,
        target,
        how,
        recipe=recipe,
        encoder=o.known_encoder(encoder),
        verify_encoder=o.one_of("--verify-encoder", verify_encoder, "all", "sample", "start"),
        encoder_patience=encoder_patience,
        on_bad_record=o.one_of("--on-bad-record", on_bad_record, "fail", "quarantine"),
        max_bad_records=max_bad_records,
        max_record_size=o.size_of("--max-record-size", max_record_size),
        endpoint=endpoint,
        from_stage=from_stage,
        selection=selection,
    )
    report(summary, target, json)
