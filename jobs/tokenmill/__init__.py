"""tokenmill: from a text corpus to a Megatron-LM training run.

Rooms; each room imports only rooms below it in this list:

    cli          the command line
    data_prep    a Python interface with the names of NVIDIA's data preparation module
    submit       `--on`: the same command as jobs of Slurm or releases of the charts
    pipelines    several stages as one command: `run`, `sft`, `sample`
    loaders      the samples in each training framework, and the check of what each one reads (`check-data`)
    reports      reports about outputs and runs, and the comparison of runs
    train        a training run: its settings, its data, its supervision
    data         the public interface of samples
    checkpoints  Megatron-LM's checkpoints: complete or not, import, export
    samples      the samples of datasets in Megatron-LM's order
    stages       the data stages: for each stage, its plan and the work for one unit
    packs        files of packed rows
    tokenize     tokenizers, encoder processes, the pairs of a unit
    fit          which layouts of a model fit a number of GPUs
    models       the architecture of a model, and the presets
    datasets     the .bin/.idx format, and how datasets are opened, blended and split
    sources      the Hub, buckets, web servers and directories
    engine       plans stages, assigns units to workers, records finished units and resumes stages
    records      decompression, blocks and records of text
    core         files on shared storage, JSON, sizes and tables, secrets

docs/glossary.md defines the terms: stage, unit, worker, plan, receipt, manifest, lease and others.
"""

__version__ = "0.1.0"
