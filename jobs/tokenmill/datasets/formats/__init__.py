"""The format of datasets: `indexed` is that of Megatron-LM, `base` has what its writer and its checks share."""
