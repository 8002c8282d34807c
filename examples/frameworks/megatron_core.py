"""Train with the GPTModel of Megatron-Core, in data parallelism.

torchrun --nproc-per-node 2 examples/frameworks/megatron_core.py out/preprocessed --out runs/megatron-core
"""

from contextlib import nullcontext

import common
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron-Core places its buffers there

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from tokenmill.loaders.torch import Loader

if not torch.cuda.is_available():
    CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()  # random states of GPUs


def convert_model(llama: LlamaForCausalLM) -> GPTModel:
    """Return a GPTModel with the architecture and the weights of the other programs' model."""
    shape = llama.config
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        shape.vocab_size,
        shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    weights = llama.state_dict()
    names = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm"}
    converted = {f"{name}.weight": weights[f"{source}.weight"] for name, source in names.items()}
    if not shape.tie_word_embeddings:
        converted["output_layer.weight"] = weights["lm_head.weight"]
    for number in range(shape.num_hidden_layers):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        # One matrix with the heads of each group: its queries, its key, its value.
        parts = [weights[f"{source}.self_attn.{name}_proj.weight"] for name in "qkv"]
        groups = [part.view(shape.num_key_value_heads, -1, shape.hidden_size) for part in parts]
        converted[f"{target}.self_attention.linear_qkv.weight"] = torch.cat(groups, 1).flatten(0, 1)
        gate_up = [weights[f"{source}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        converted[f"{target}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
        for name, other in (
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("mlp.linear_fc2", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            converted[f"{target}.{name}.weight"] = weights[f"{source}.{other}.weight"]
    extra = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    model.load_state_dict(converted | extra)
    return model


def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the mean loss of the loss tokens; the model itself computes the loss of each token."""
    tokens, labels, mask, positions = (
        batch[name].to(device) for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        losses = model(tokens, positions, hidden, labels=labels.clamp(min=0))
    return (losses.float() * mask).sum() / mask.sum()


def main() -> None:
    """Train to the last step."""
    options = common.parse_arguments()
    device = common.find_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(options.seed)
    samples = common.open_samples(options)
    llama = common.make_model(options)
    log = common.RunLog(options, samples, llama)

    model = DistributedDataParallel(
        convert_model(llama).to(device), process_group=parallel_state.get_data_parallel_group()
    )
    optimizer = common.make_optimizer(model, options)
    rank, world = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    loader = Loader(samples, options.micro_batch, rank=rank, world=world, global_batch=options.global_batch)

    if log.step:
        state = torch.load(log.directory(log.step) / "state.pt", map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["data"])
    batches = iter(loader)
    log.start()
    while log.step < options.steps:
        for number in range(loader.accumulation):
            batch = next(batches)
            with nullcontext() if number == loader.accumulation - 1 else model.no_sync():
                loss = compute_loss(model, batch, device)
                (loss / loader.accumulation).backward()
            log.add(batch["tokens"], batch["labels"], loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        log.end_step(loader.consumed, loader.data_wait_seconds)
        if log.saves():
            if dist.get_rank() == 0:
                log.directory(log.step).mkdir(exist_ok=True)
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"data": loader.state_dict()}, log.directory(log.step) / "state.pt")
            log.end_save()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
