"""`tokenmill run`: a source through all stages on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def run(
    source: Annotated[str, typer.Argument(help="hf://datasets/ORG/NAME, https://, s3://, gs://, az:// or a path.")],
    output: Annotated[Path, typer.Argument(help="Directory to write to, one below it for each stage.")],
    tokenizer: o.Tokenizer = ...,  # type: ignore[assignment]
    tokenizer_revision: o.TokenizerRevision = None,
    extract: Annotated[
        bool, typer.Option("--extract/--no-extract", help="Keep the text decompressed as well.")
    ] = False,
    concatenate: Annotated[
        int | None, typer.Option("--concatenate", min=1, help="Join the decompressed text into N files first.")
    ] = None,
    revision: o.Revision = None,
    include: o.Include = [],  # noqa: B006 - typer copies it
    exclude: o.Exclude = [],  # noqa: B006
    split: o.Split = None,
    sample: o.Sample = None,
    prefer: o.Prefer = None,
    connections: o.Connections = 8,
    deadline: o.Deadline = o.DAY,
    stall_seconds: o.StallSeconds = 60.0,
    endpoint: o.Endpoint = None,
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
    processes: o.Processes = None,
    replace: o.Replace = False,
    verify_hashes: o.VerifyHashes = False,
    json: o.Json = False,
) -> None:
    """Take a source through download, preprocess and verify on this machine; extract and concatenate on request."""
    from tokenmill.cli.report import how_to_run, report_pipeline
    from tokenmill.corpus.source import normalize_source
    from tokenmill.stages.launch import Pipeline
    from tokenmill.tokens.encoder_store import Recipe

    how = how_to_run(0, 1, processes, replace, verify_hashes, json)
    pipeline = Pipeline(
        normalize_source(source),
        output,
        Recipe(
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
        ),
        revision=revision,
        selection=o.selection(include, exclude, split, sample, prefer),
        extract=extract,
        concatenate=concatenate,
        connections=connections,
        deadline_seconds=deadline,
        stall_seconds=stall_seconds,
        endpoint=endpoint,
        encoder=o.known_encoder(encoder),
        verify_encoder=o.one_of("--verify-encoder", verify_encoder, "all", "sample", "start"),
        encoder_patience=encoder_patience,
        on_bad_record=o.one_of("--on-bad-record", on_bad_record, "fail", "quarantine"),
        max_bad_records=max_bad_records,
        max_record_size=o.size_of("--max-record-size", max_record_size),
    )
    report_pipeline(pipeline, pipeline.run(how), how)
