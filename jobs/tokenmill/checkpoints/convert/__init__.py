"""Convert models between Hugging Face's format and Megatron-LM's torch_dist checkpoints, without torch or a GPU.

    module          responsibility
    safetensors     read and write Hugging Face's weight files
    huggingface     config.json of a model: its family, and its architecture as settings
    mapping         which rows of which Hugging Face tensor a tensor of Megatron-LM consists of
    opcodes         opcodes of pickle for single values
    archive         a tensor in the format of torch.save, written and read as a stream
    metadata        .metadata of a torch_dist checkpoint, written and read
    vocabulary      compare the vocabularies of two tokenizers
    importer        Hugging Face -> Megatron-LM
    exporter        Megatron-LM -> Hugging Face
    model_card      README.md of an exported model
    initial_weights check the checkpoint of checkpoint.loadPath before a run starts

Both directions use the same table (`mapping`) and copy bytes, so that an import and an export give the same tensors,
bit for bit. Weights are data of an unknown origin: sizes, names and offsets are checked before they are used, and no
pickle is executed.
"""
