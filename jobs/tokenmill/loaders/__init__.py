"""Hand the samples of `tokenmill.data` to training programs: loaders that resume exactly, on any number of ranks.

    samples = tokenmill.data.open("corpus/tokenized", seq_length=4096, samples=1_000_000)
    loader = tokenmill.loaders.torch.Loader(samples, micro_batch=4)
    for batch in loader:
        ...

Modules; each of the frameworks' modules imports its framework, and needs the extra of the same name:

    state      the position of a run in its samples, as checkpoints store it
    torch      data sets and the loader for every loop in PyTorch: FSDP2, DDP, DeepSpeed
    deepspeed  the loader of a DeepSpeed engine
    hf         data set, collator and callback for the Trainer of Transformers
    lightning  a data module for Lightning
    titan      the data loader of torchtitan
    grain      data source and dataset of Grain, for MaxText and other programs in JAX
    megatron   the configuration with which Megatron-LM, Megatron-Bridge and NeMo read the same samples themselves

docs/frameworks.md shows each of them.
"""
