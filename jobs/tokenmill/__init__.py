"""tokenmill: from a text corpus to a Megatron-LM training run.

The packages, in the order in which data flows through them:

- `corpus` lists and reads sources: the Hub, buckets, web servers and directories.
- `stages` has the data stages: for each stage, its plan and the work for one unit.
- `flow` plans stages, assigns units to workers, records finished units and resumes stages.
- `tokens` encodes text and writes Megatron-LM's indexed datasets.
- `training` plans, starts and supervises a training run.
- `files` has the file operations on shared storage that all of them use.
- `cli` is the command line.

docs/glossary.md defines the terms: stage, unit, worker, plan, receipt, manifest, lease and others.
"""

__version__ = "0.1.0"
