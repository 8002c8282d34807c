"""From a finished dataset to a Megatron-LM run that starts right, survives and says when it has not finished."""
