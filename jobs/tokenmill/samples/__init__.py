"""Training samples from pairs and packed rows: Megatron-LM's samples in Megatron-LM's order, with numpy alone.

    samples = tokenmill.data.open("corpus/tokenized", seq_length=4096, samples=1_000_000)
    batch = samples.batch([0, 1, 2, 3])

`tokenmill.datasets` opens the pairs. Modules; each module uses only modules above it:

    identity        what determines the samples; fingerprints, differences
    run_record      the record of a run's data
    batch           the arrays of a batch; boundaries of documents
    epochs          the number of epochs and samples
    pair_order      the permutations of one pair
    order_store     keeps large orders in files
    draw_loop       computes draws of a blend, compiled if numba is installed
    draw_counts     stores the counts from which draws continue
    draws           the draws of a blend
    pair_samples    locates and reads the samples of one pair
    sample_sources  the sources of samples: pairs, random tokens
    packed_samples  the source of packed rows
    samples         the samples of a run: batches, digests, origins
    pack_source     finds packed rows
    pair_blend      Megatron-LM's rules for blends and epochs
    opening         `open`
    order           which sample each rank takes at each step

`tokenmill.loaders` hands the samples to training programs, docs/frameworks.md shows how.
"""
