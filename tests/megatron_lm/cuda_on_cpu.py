"""Run a program that was written for CUDA on the CPU: replace the functions of torch.cuda that Megatron-LM calls.

`pretrain.py` calls `install` before it imports Megatron-LM, and `install_optimizer` afterwards. Needed too:
TORCHDYNAMO_DISABLE=1, the backend gloo, and the arguments that the settings of tests/support/megatron_runs.py have.
Weights, gradients and losses are those of the CPU; only memory statistics and device properties are constants.
"""

import collections
import contextlib
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.random
import torch.distributed

GIB = 1 << 30
FACTORIES = (
    *("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "linspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "as_tensor", "tril_indices"),
)
"""Functions of torch that make a tensor on a device."""


class CpuDevice(str):
    """The name of the CPU, which is written as a number in a text: Megatron-LM also composes names such as cuda:0."""

    def __format__(self, specification: str) -> str:
        """Return the number of the device."""
        return "0"


class CpuStream:
    """A stream without work to wait for, because the CPU runs operations in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept a device."""

    def wait_stream(self, *_: Any) -> None:
        """Return at once."""

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> "CpuEvent":
        """Return an event with the present time."""
        return CpuEvent()

    def query(self) -> bool:
        """Return that no work is left."""
        return True

    def is_capturing(self) -> bool:
        """Return that no graph is recorded."""
        return False


class CpuEvent:
    """A point in time for Megatron-LM's timers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Record the present time."""
        self.record()

    def record(self, *_: Any) -> None:
        """Record the present time."""
        self.seconds = time.perf_counter()

    def wait(self, *_: Any) -> None:
        """Return at once."""

    synchronize = wait

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def elapsed_time(self, other: "CpuEvent") -> float:
        """Return the milliseconds until another event."""
        return (other.seconds - self.seconds) * 1000


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the number of its step in the parameter group, as in Apex and Transformer Engine.

    With PyTorch's own AdamW, Megatron-LM saves a checkpoint of the distributed optimizer that it cannot load
    (distrib_optimizer.py: `assert len(steps) == 1`).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        """Accept the arguments of Apex's optimizer."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient (Loshchilov and Hutter 2019, algorithm 2)."""
        for group in self.param_groups:
            step = group["step"] = int(group.get("step", 0)) + 1
            first_beta, second_beta = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                gradient = parameter.grad.float()
                state["exp_avg"].lerp_(gradient, 1 - first_beta)
                state["exp_avg_sq"].mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
                scale = (state["exp_avg_sq"] / (1 - second_beta**step)).sqrt_().add_(group["eps"])
                update = state["exp_avg"] / scale / (1 - first_beta**step)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])


def install() -> None:
    """Replace the functions of torch that need a GPU."""
    _replace_device_functions(torch.cuda)
    _replace_tensor_methods(torch.Tensor, torch.nn.Module)
    for name in FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))
    _replace_backend(torch.distributed)


def install_optimizer() -> None:
    """Give Megatron-LM `FusedAdam` instead of PyTorch's optimizer, and let it accept the compiled dataset helpers."""
    import megatron.core.datasets.utils
    import megatron.core.optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    megatron.core.optimizer.Adam = distributed.Adam = FusedAdam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    megatron.core.datasets.utils.compile_helpers = _make_noop()  # a wheel has no Makefile


def _make_noop() -> Callable[..., None]:
    """Return a new function without effect; torch refuses the same function under two names."""
    return lambda *_, **__: None


def _choose_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


def _replace_device_functions(cuda: Any) -> None:
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: CpuDevice("cpu")
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "cpu"
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=80 * GIB, multi_processor_count=1, name="cpu")
    cuda.get_device_properties = lambda *_: properties
    cuda.mem_get_info = lambda *_: (80 * GIB, 80 * GIB)
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    for name in ("set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, _make_noop())
    cuda.manual_seed_all, cuda._lazy_init, cuda.random._lazy_init = _make_noop(), _make_noop(), _make_noop()
    cuda._lazy_call = lambda call: call()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = collections.defaultdict(lambda: torch.default_generator)
    cuda.Stream, cuda.Event = CpuStream, CpuEvent
    cuda.current_stream = cuda.default_stream = lambda *_: CpuStream()
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx = types.SimpleNamespace(
        range_push=_make_noop(), range_pop=_make_noop(), range=lambda *_: contextlib.nullcontext()
    )
    for name in ("Float", "Half", "BFloat16", "Long", "Int", "Byte", "Double"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.accelerator.current_stream = lambda *_: CpuStream()
    torch.accelerator.is_available = lambda *_: False
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = _make_noop()


def _replace_tensor_methods(tensor: Any, module: Any) -> None:
    tensor.cuda = tensor.pin_memory = module.cuda = lambda self, *_, **__: self
    tensor.is_cuda = property(lambda self: True)
    tensor.record_stream = _make_noop()
    tensor_type, tensor_to, module_to = tensor.type, tensor.to, module.to

    def convert_type(self: Any, dtype: Any = None, *rest: Any, **named: Any) -> Any:
        if dtype is None:  # Megatron-LM compares the result with names such as torch.cuda.FloatTensor
            return tensor_type(self).replace("torch.", "torch.cuda.")
        return tensor_type(
            self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *rest, **named
        )

    def stay_on_cpu(call: Callable[..., Any], kinds: Any) -> Callable[..., Any]:
        def move(self: Any, *rest: Any, **named: Any) -> Any:
            rest = tuple(_choose_cpu(value) if isinstance(value, kinds) else value for value in rest)
            if "device" in named:
                named["device"] = _choose_cpu(named["device"])
            return call(self, *rest, **named)

        return move

    tensor.type = convert_type
    tensor.to = stay_on_cpu(tensor_to, (str, torch.device))
    module.to = stay_on_cpu(module_to, (str, torch.device, int))


def _with_cpu_device(call: Callable[..., Any]) -> Callable[..., Any]:
    def make(*rest: Any, **named: Any) -> Any:
        if named.get("device") is not None:
            named["device"] = _choose_cpu(named["device"])
        named.pop("pin_memory", None)
        return call(*rest, **named)

    return make


def _replace_backend(distributed: Any) -> None:
    init_process_group, new_group = distributed.init_process_group, distributed.new_group

    def init_with_gloo(*rest: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        return init_process_group(*rest, **{**named, "backend": "gloo"})

    def new_gloo_group(*rest: Any, **named: Any) -> Any:
        named.pop("pg_options", None)
        if named.get("backend") in ("nccl", None):
            named["backend"] = "gloo"
        return new_group(*rest, **named)

    distributed.init_process_group, distributed.new_group = init_with_gloo, new_gloo_group
