"""The data stages: what each stage reads and writes, what one unit of its work is, and how the unit resumes.

Data flows through the stages in this order. `extract` and `concatenate` are optional: `preprocess` also reads
compressed files, and groups files itself. `adopt` replaces all other stages for pairs that another tool made.

| stage       | input -> output                                     | one unit                   | interrupted unit    |
|-------------|-----------------------------------------------------|----------------------------|---------------------|
| download    | files of a source -> the same files, checked        | one file                   | resumes at the byte |
| extract     | .zst .gz .bz2 .xz -> .jsonl                         | one input file             | starts again        |
| concatenate | many .jsonl files -> `--target-files` .jsonl files  | one output file            | starts again        |
| preprocess  | JSONL, JSON, Parquet, Arrow, text -> .bin/.idx      | one output, a pair per key | resumes at the file |
| adopt       | .bin/.idx of another tool -> the same, with records | one pair                   | starts again        |

An interrupted download continues at the byte where it stopped, and an interrupted preprocess unit at the input file.

Each stage is a dataclass derived from `flow.stage.Stage`:

- `prepare` returns a `Request`: the parameters of the stage as JSON, and a function that makes the plan. The plan lists
  all units and is stored once in `plan.json`.
- `do` does one unit in a `Workspace` and returns its counts.

`flow` does everything else. It assigns units to workers, and writes a receipt for each finished unit and a manifest
when all units are finished. The same command, run again, reads the plan and does only the units without a receipt.
"""
