"""Convert models between Hugging Face's format and Megatron-LM's torch_dist checkpoints, without torch or a GPU.

    module          responsibility
    safetensors     read and write Hugging Face's weight files
    huggingface     config.json of a model, read and written
    opcodes         opcodes of pickle for single values
    archive         a tensor in the format of torch.save, written and read as a stream
    metadata        .metadata of a torch_dist checkpoint, written and read
    vocabulary      compare the vocabularies of two tokenizers
    importer        Hugging Face -> Megatron-LM
    exporter        Megatron-LM -> Hugging Face
    model_card      README.md of an exported model
    initial_weights check the checkpoint of checkpoint.loadPath before a run starts

What differs between models is in `checkpoints.families`. Both directions use the same table of a family and copy bytes,
so that an import and an export give the same tensors, bit for bit. Weights are data of an unknown origin: sizes, names
and offsets are checked before they are used, and no pickle is executed.
"""
