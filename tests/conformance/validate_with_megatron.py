"""Validate a command line with Megatron-LM's own checks, without a GPU: `validate_with_megatron.py CHECKOUT WORLD`.

Reads the arguments as a JSON list from standard input, and prints the data-parallel size.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch

checkout, world = sys.argv[1:]
sys.path.insert(0, checkout)
os.environ.update(WORLD_SIZE=world, RANK="0", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
torch.cuda.get_device_capability = lambda *_: (9, 0)  # the values of a Hopper GPU
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
from megatron.training import arguments  # noqa: E402 - from the checkout

# Transformer Engine, which fuses rotary embeddings, is not installed without GPUs.
sys.argv = ["pretrain_gpt.py", *json.load(sys.stdin), "--no-rope-fusion"]
args = arguments.validate_args(arguments.parse_args())
arguments.core_transformer_config_from_args(args)
print(args.data_parallel_size)
