"""The data of a run: datasets are blended, divided into splits and passed to Megatron-LM with their sample index.

`tokenmill.data` opens datasets and divides them. Modules; each module uses only modules above it:

    blend          opens the datasets of a run and computes their weights
    prompts        the formats of a fine-tuning run's conversations
    conversations  opens the datasets of a fine-tuning run, and checks their first rows
    blend_samples  checks that Megatron-LM can draw the run's samples from a blend
    resolve        checks that a blend meets the requirements of the run
    flags          writes the datasets in Megatron-LM's form: flags, blend file, directory of the sample index
    summary        describes the datasets in log lines
    index          builds the sample index on a CPU before the GPUs start
    index_child    the subprocess of index: runs under Megatron-LM's Python, with the standard library only
"""
