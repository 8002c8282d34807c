"""What a run reads: datasets blended, cut into splits, and the sample index that Megatron-LM reads.

Modules, those that read others below them:

    split        how a list of datasets is cut into train, validation and test
    datasets     the records: pair, weighted dataset, all data of a run
    sources      opens an output of preprocess, or one pair of it
    blend        chooses and weights the datasets
    samples      whether Megatron-LM can draw the run's samples from a blend
    resolve      holds a blend to what the run needs
    flags        the datasets as Megatron-LM reads them: flags, the file of a blend, the index's directory
    summary      the datasets in words
    index        builds the sample index before GPUs wait for it
    index_child  the part of that which runs under Megatron-LM's Python, with the standard library alone
"""
