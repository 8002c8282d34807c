"""The data stages: what each stage reads and writes, what one unit is, and what happens to an interrupted unit.

    stage        input -> output                                      one unit                    interrupted unit
    download     files of a source -> the same files, checked         one file                    continues at the byte
                                                                                                  if there is a hash
    extract      .zst .gz .bz2 .xz -> .jsonl                          one input file              starts again
    concatenate  many .jsonl files -> `--target-files` .jsonl files   one output file             starts again
    transform    JSONL, JSON, Parquet, Arrow -> .jsonl                one output file             starts again
    preprocess   JSONL, JSON, Parquet, Arrow, text -> .bin/.idx       pairs of one input file     continues at the first
                                                                      or group of input files     unfinished file
    chat         JSONL, JSON, Parquet, Arrow -> .bin/.idx and masks   as preprocess               as preprocess
    pack         pairs -> packed rows in .parquet, .npy or .jsonl     one output file             starts again
    adopt        .bin/.idx of another tool -> the same, registered    one pair                    starts again

Data flows through download, extract, concatenate and preprocess, in this order, or for conversations through download,
transform, chat and pack. `extract`, `concatenate` and `transform` are optional: `preprocess` and `chat` also read
compressed files, and group files themselves. `adopt` is used instead of these stages for pairs that another tool made.

Each stage is a dataclass derived from `engine.stage.Stage`:

- `prepare` returns a `Request`: the parameters of the stage and the state of its input as JSON, and a function that
  makes the plan. The plan lists all units and is stored in `plan.json`.
- `do` does one unit in a `Workspace` and returns its numbers of records.

`engine` does everything else. It assigns units to workers, and writes a receipt for each finished unit and a manifest
when all units are finished. The same command, run again, reads the plan and does only the units without
a valid receipt.
"""
