"""Files that training programs write about a run: logs of Megatron-LM, TensorBoard events, CSV, JSONL, trainer states.

The losses follow a power law with noise, so that a plot of them looks like a run.
"""

import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.samples.identity import DataIdentity, SourceIdentity
from tokenmill.samples.run_record import write_record

SEQ_LENGTH, GLOBAL_BATCH = 128, 8


def loss_at(step: int, seed: int = 0) -> float:
    """Return the loss of a step, the same at each call."""
    return 2.0 + 8.0 * (step + 3) ** -0.35 + 0.05 * random.Random(step * 31 + seed).gauss(0, 1)


def identity(**changes: Any) -> DataIdentity:
    """Return the identity of one dataset, with changed fields."""
    fields: dict[str, Any] = {
        "kind": "pairs",
        "sources": (SourceIdentity("/data/corpus_text_document", "a" * 32),),
        "tokenizer": "b" * 32,
        "seq_length": SEQ_LENGTH,
        "samples": 8000,
        "seed": 1234,
        "split": "99,1,0",
        "part": "train",
        "surplus": 0.005,
    }
    return DataIdentity(**fields | changes)


def write_jsonl_run(
    directory: Path,
    steps: Iterable[int] = range(1, 201),
    *,
    record: DataIdentity | None = None,
    global_batch: int = GLOBAL_BATCH,
    seed: int = 0,
    seconds: Callable[[int], float] = lambda step: 0.5,
    digest: Callable[[int], str] | None = lambda step: f"{step:032x}",
    **fields: Any,
) -> Path:
    """Write metrics.jsonl as the examples do, and the record of the run's data, if any; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    clock = 1_764_000_000.0
    with (directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            clock += seconds(step)
            row = {
                "step": step,
                "consumed_samples": step * global_batch,
                "tokens": step * global_batch * SEQ_LENGTH,
                "loss": loss_at(step, seed),
                "seconds": seconds(step),
                "data_wait_seconds": seconds(step) / 100,
                "time": clock,
            }
            if digest is not None:
                row["digest"] = digest(step)
            file.write(json.dumps(row | fields) + "\n")
    if record is not None:
        write_record(directory, record, global_batch)
    return directory


def megatron_line(
    step: int, *, clock: int = 0, milliseconds: float = 500.0, loss: float | None = None, nan: int = 0, skipped: int = 0
) -> str:
    """Return a line of Megatron-LM's training_log."""
    stamp = f"2026-11-25 {10 + clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}"
    return (
        f" [{stamp}] iteration {step:8d}/    1000 | consumed samples: {step * GLOBAL_BATCH:12d} | elapsed time per "
        f"iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 10.0 | learning rate: 1.000000E-04 | "
        f"global batch size: {GLOBAL_BATCH:5d} | lm loss: {loss_at(step) if loss is None else loss:.6E} | "
        f"loss scale: 1.0 | grad norm: {1 + 1 / step:.3f} | number of skipped iterations: {skipped:3d} | "
        f"number of nan iterations: {nan:3d} |"
    )


def megatron_arguments(**arguments: object) -> str:
    """Return the list of arguments that Megatron-LM prints at its start."""
    values = {"seq_length": SEQ_LENGTH, "global_batch_size": GLOBAL_BATCH, "train_iters": 1000, "world_size": 4}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in (values | arguments).items()]
    return "\n".join(
        [
            "using world size: 4, data-parallel size: 4",
            "------------------------ arguments ------------------------",
            *sorted(lines),
            "-------------------- end of arguments ---------------------",
        ]
    )


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes, bit by bit, from its definition (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    result = b""
    while value > 0x7F:
        result, value = result + bytes([value & 0x7F | 0x80]), value >> 7
    return result + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def tf_record(content: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def event(tag: str, step: int, value: float | str, clock: float) -> bytes:
    """Return a record with a scalar, or with a text as SummaryWriter.add_text writes it."""
    if isinstance(value, str):
        tensor = _varint(1 << 3) + _varint(7) + _field(8, value.encode())
        plugin = _field(9, _field(1, _field(1, b"text")))
        content = _field(1, tag.encode()) + plugin + _field(8, tensor)
    else:
        content = _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    head = b"\x09" + struct.pack("<d", clock) + (b"\x10" + _varint(step) if step else b"")
    return tf_record(head + _field(5, _field(1, content)))


def write_events(path: Path, events: Sequence[tuple[str, int, float | str]], start: float = 1_764_000_000.0) -> Path:
    """Write a TensorBoard file with (tag, step, value) in this order, one second per step; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    version = b"\x09" + struct.pack("<d", start) + _field(3, b"brain.Event:2")
    path.write_bytes(tf_record(version) + b"".join(event(*entry, start + entry[1]) for entry in events))
    return path


def write_trainer_state(directory: Path, steps: int = 100, every: int = 10) -> Path:
    """Write a trainer_state.json as transformers 5.23 does with include_num_input_tokens_seen and an evaluation."""
    directory.mkdir(parents=True, exist_ok=True)
    history: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        tokens = step * GLOBAL_BATCH * SEQ_LENGTH
        row = {"epoch": step / steps, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": loss_at(step), "step": step}
        speed = {"train_runtime": step / 2, "train_tokens_per_second": 2.0 * tokens / step}
        history.append(row | speed | {"num_input_tokens_seen": tokens})
        if step % 50 == 0:
            history.append({"epoch": step / steps, "eval_loss": 3.0, "eval_runtime": 1.0, "step": step})
    summary = {"total_flos": 1.0, "train_loss": 99.0, "train_runtime": steps / 2, "train_samples_per_second": 9.0}
    history.append(summary | {"epoch": 1.0, "step": steps})
    state = {
        "best_metric": None,
        "epoch": 1.0,
        "global_step": steps,
        "is_world_process_zero": True,
        "log_history": history,
        "logging_steps": every,
        "max_steps": steps,
        "num_train_epochs": 1,
        "stateful_callbacks": {},
        "train_batch_size": 2,
    }
    (directory / "trainer_state.json").write_text(json.dumps(state, indent=2))
    return directory


def write_lightning_csv(path: Path, steps: int = 100) -> Path:
    """Write a metrics.csv as Lightning's CSVLogger does, with rows of the validation and empty cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["epoch,lr,step,train_loss,val_loss"]
    for step in range(9, steps, 10):
        lines.append(f"0,0.0001,{step},{loss_at(step)},")
        if step % 50 == 49:
            lines.append(f"0,,{step},,3.5")
    path.write_text("\n".join(lines) + "\n")
    return path


def expected_rate(seconds: float = 0.5) -> float:
    """Return the tokens per second of a run whose steps take so long."""
    return SEQ_LENGTH * GLOBAL_BATCH / seconds


def is_close(value: float | None, expected: float, tolerance: float = 0.02) -> bool:
    """Return whether a number is close to another, and not missing."""
    return value is not None and math.isclose(value, expected, rel_tol=tolerance)
