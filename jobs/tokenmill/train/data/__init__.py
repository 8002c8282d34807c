"""The data of a run: datasets are blended, divided into splits and passed to Megatron-LM with their sample index.

`tokenmill.data` opens datasets and divides them. Modules; each module uses only modules above it:

    blend          opens the datasets of a run and computes their weights
    prompts        the formats of a fine-tuning run's conversations
    conversations  opens the datasets of a fine-tuning run, and checks their first rows
    blend_samples  checks that Megatron-LM can draw the run's samples from a blend
    data_arguments  Megatron-LM's arguments for datasets, and the samples that it requests
    resolve        checks that a blend meets the requirements of the run
    flags          writes the datasets in Megatron-LM's form: flags, blend file, directory of the sample index
    index_plan     the files of the sample index, and what is in them
    tokenizer_child  the subprocess of index: runs under Megatron-LM's Python, with the standard library only
    index          builds the sample index on CPUs before the GPUs start, and finds it at a start
    summary        describes the datasets and the index in log lines
"""
