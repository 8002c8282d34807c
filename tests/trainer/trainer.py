"""A small trainer instead of Megatron-LM, with the same arguments, output lines, tracker and checkpoint files.

tests/conformance/megatron_training/test_fidelity.py compares it with Megatron-LM itself.
The trainer adds numbers over its ranks: through gloo if torch is installed, otherwise over TCP. The directory
$TRAINER_FAULTS contains one file for each fault. The rank with the fault removes the file. Rank 0 appends a line for
each load, iteration, and start and end of a save to the file $TRAINER_HISTORY.
"""

import argparse
import datetime
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

KINDS = {"int": int, "float": float, "bool": lambda text: text == "true"}
FAULTS = Path(os.environ.get("TRAINER_FAULTS", "/nonexistent"))
STEP = float(os.environ.get("TRAINER_STEP_SECONDS", "0.02"))
SHARD_BYTES = int(os.environ.get("TRAINER_SHARD_BYTES", "4096"))
SAVE = float(os.environ.get("TRAINER_SAVE_SECONDS", "0"))
HISTORY = os.environ.get("TRAINER_HISTORY", os.devnull)
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parser() -> argparse.ArgumentParser:
    """Return a parser of Megatron-LM's arguments; an invalid flag, arity or choice causes exit code 2."""
    table = json.loads(Path(__file__).with_name("megatron-arguments.json").read_text())["arguments"]
    result = argparse.ArgumentParser(allow_abbrev=False)
    for flag, spec in table.items():
        if flag == "--help":
            continue
        names = [flag, *spec.get("also", [])]
        destination = names[-1].lstrip("-").replace("-", "_")
        if spec["kind"] in ("StoreTrue", "StoreFalse", "BooleanOptional"):
            result.add_argument(*names, dest=destination, action="store_true")
            continue
        choices = [str(choice).rpartition(".")[2] for choice in spec.get("choices", [])] or None
        kind = KINDS.get(spec.get("type", "str"), str)
        if kind is not str:
            choices = [kind(choice) for choice in choices] if choices else None
        extra = {"nargs": spec["nargs"]} if "nargs" in spec else {}
        result.add_argument(*names, dest=destination, type=kind, choices=choices, **extra)  # type: ignore[arg-type]
    return result


class Peers:
    """Maxima over all ranks; a lost rank is an error on all others, as in a collective operation."""

    def __init__(self) -> None:
        """Connect the ranks at MASTER_ADDR:MASTER_PORT."""
        self.links: list[socket.socket] = []
        address = (os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0")))
        if WORLD == 1:
            return
        deadline = time.monotonic() + 60
        if RANK == 0:
            server = socket.create_server(("", address[1]), reuse_port=False)
            server.settimeout(60)
            self.links = [server.accept()[0] for _ in range(WORLD - 1)]
            server.close()
            return
        while True:
            try:
                self.links = [socket.create_connection(address, timeout=5)]
                self.links[0].settimeout(None)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise RuntimeError("DistNetworkError: Timed out waiting for rank 0") from None
                time.sleep(0.05)

    def most(self, value: int) -> int:
        """Return the greatest of all ranks' values."""
        RECORDER.start()
        if RANK == 0:
            value = max([value, *map(receive, self.links)])
        for link in self.links:
            link.sendall(struct.pack("<q", value))
        value = value if RANK == 0 or not self.links else receive(self.links[0])
        RECORDER.complete()
        return value


class FlightRecorder:
    """The last operation of this rank, which a byte in a named pipe dumps, as with torch and NCCL."""

    def __init__(self) -> None:
        """Create the pipe and the thread that reads it, under the conditions of torch."""
        self.sequence, self.completed = 0, 0
        prefix = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
        if prefix and int(os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")) > 0:
            self.pipe = f"{prefix}{RANK}.pipe"
            os.mkfifo(self.pipe)
            threading.Thread(target=self._serve, daemon=True).start()

    def start(self) -> None:
        """Record that an operation has started."""
        self.sequence += 1

    def complete(self) -> None:
        """Record that the operation is complete."""
        self.completed = self.sequence

    def _serve(self) -> None:
        handle = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        while not os.read(handle, 128):
            time.sleep(0.05)
        entry = {
            "process_group": ("0", "default_pg"),
            "pg_id": 0,
            "collective_seq_id": self.sequence,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[1]],
            "output_sizes": [[1]],
            "state": "completed" if self.completed == self.sequence else "started",
            "frames": [{"name": "most", "filename": __file__, "line": 1}],
        }
        ranks = str(list(range(WORLD)))
        dump = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
            "pg_status": {"0": {"last_completed_collective": self.completed}},
            "entries": [entry] if self.sequence else [],
        }
        Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{RANK}").write_bytes(pickle.dumps(dump, protocol=2))


RECORDER = FlightRecorder()


class Gloo:
    """Maxima over all ranks through torch.distributed."""

    def __init__(self) -> None:
        """Connect the ranks with the environment that torchrun sets."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))

    def most(self, value: int) -> int:
        """Return the greatest of all ranks' values."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())


def receive(link: socket.socket) -> int:
    """Receive a value."""
    data = link.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("Connection closed by peer")
    return int(struct.unpack("<q", data)[0])


def fault(name: str) -> bool:
    """Return whether this rank has a fault, and remove its file."""
    for file in (FAULTS / name, FAULTS / f"{name}.rank{RANK}"):
        try:
            file.unlink()
        except OSError:
            continue
        return True
    return any((FAULTS / f"{fault_name}.always").exists() for fault_name in (name, f"{name}.rank{RANK}"))


def pickled(value: Any) -> bytes:
    """Pickle the content of .metadata without torch's classes; (class, fields) stands for an object."""
    if value is None:
        return b"N"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value)) + value.encode()
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(key) + pickled(item) for key, item in value.items()) + b"u"
    (module, name), fields = value
    return f"c{module}\n{name}\n".encode() + b")\x81" + pickled(dict(fields)) + b"b"


def metadata(sizes: dict[str, int]) -> bytes:
    """Return a .metadata as torch.distributed.checkpoint writes it."""
    module = "torch.distributed.checkpoint.metadata"
    entries = {}
    for number, (name, size) in enumerate(sorted(sizes.items())):
        index = ((module, "MetadataIndex"), (("fqn", f"model.{number}"), ("offset", None), ("index", None)))
        extent = (("relative_path", name), ("offset", 0), ("length", size))
        entries[index] = (("torch.distributed.checkpoint.filesystem", "_StorageInfo"), extent)
    content = (("state_dict_metadata", {}), ("planner_data", None), ("storage_data", entries))
    return b"\x80\x02" + pickled(((module, "Metadata"), content)) + b"."


def save(peers: Any, directory: Path, iteration: int, total: int) -> None:
    """Write a checkpoint in Megatron-LM's order: shards, .metadata, metadata.json, tracker."""
    target = directory / f"iter_{iteration:07d}"
    target.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        record("saving", iteration)
        log(f"[{timestamp()}] saving checkpoint at iteration {iteration:7d} to {directory} in torch_dist format")
    shard = json.dumps({"iteration": iteration, "sum": total, "rank": RANK}).encode().ljust(SHARD_BYTES)
    (target / f"__{RANK}_0.distcp").write_bytes(shard)
    time.sleep(SAVE)
    peers.most(0)
    if RANK == 0:
        if fault("die-in-save"):
            os.kill(os.getpid(), signal.SIGKILL)
        (target / ".metadata").write_bytes(metadata({f"__{rank}_0.distcp": len(shard) for rank in range(WORLD)}))
        (target / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        tracker = directory / "latest_checkpointed_iteration.txt"
        if fault("torn-tracker"):
            tracker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        tracker.write_text(str(iteration))
        record("saved", iteration)
        log(
            f"  [{timestamp()}] successfully saved checkpoint from iteration {iteration:7d} to {directory} "
            "[ t 1/1, gtp_remat 1/1, p 1/1 ]"
        )
    peers.most(0)


def load(directory: Path) -> tuple[int, int]:
    """Return the iteration and the sum of the newest checkpoint."""
    try:
        if fault("blind"):
            raise FileNotFoundError
        iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
    except OSError:
        if RANK == 0:
            log(f"WARNING: could not find the metadata file {directory / 'latest_checkpointed_iteration.txt'}")
            log("    will not load any checkpoints and will start from random")
        return 0, 0
    value = json.loads((directory / f"iter_{iteration:07d}" / "__0_0.distcp").read_bytes())
    return int(value["iteration"]), int(value["sum"])


def timestamp() -> str:
    """Return the present time as Megatron-LM prints it."""
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")


def record(event: str, iteration: int) -> None:
    """Append an event to the history of the run."""
    if RANK == 0:
        with Path(HISTORY).open("a") as history:
            history.write(f"{event} {iteration}\n")


def log(line: str) -> None:
    """Print a complete line, and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def noise() -> None:
    """Write output that is hard to parse, with an unfinished last line."""
    write = sys.stdout.buffer.write
    write(b"x" * 5_000_000 + b"\n" + bytes(range(256)) * 100 + b"\n")
    for percent in range(1000):
        write(f"\r\x1b[32m{percent / 10:5.1f}%".encode())
    write(b"\n lm loss: nothing | iteration        99999999999999999999999/ 1 | number of nan iterations: many |\n")
    write(b"UserWarning: an Error that is none\nException ignored in: <object>\nTraceback (most recent call last):\n")
    write(b'  File "x.py", line 1, in __del__\nTypeError: NoneType object is not callable\nan open line')
    sys.stdout.flush()


def draw_bar() -> None:
    """Draw a progress bar as tqdm does, which ends its line only at the end of its loop."""
    for number in range(10):
        sys.stderr.write(f"\rloading: {5 * number:3d}%|{'█' * number:10}| {number}/20 [00:0{number}<00:11,  1.00it/s]")
    sys.stderr.flush()


def main() -> int:
    """Train: each iteration adds its number to a sum, which reveals a lost or repeated iteration."""
    if fault("import"):
        raise ImportError("cannot import name 'pretrain' from 'megatron'")
    if fault("slow"):
        time.sleep(60)
    args = parser().parse_args()
    signals: list[int] = []
    gloo = os.environ.get("TRAINER_GLOO") == "1"
    peers: Any = Gloo() if gloo and WORLD > 1 else Peers()
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    if fault("assert"):
        raise AssertionError("the model is not as it should be")
    if fault("exit-3-at-start"):
        os._exit(3)
    while fault("hang-at-start"):
        time.sleep(3600)
    directory = Path(args.save)
    if args.train_samples:
        args.train_iters = args.train_samples // args.global_batch_size
    transitions = [int(text) for text in (args.phase_transition_iterations or "").split(",") if text]
    iteration, total = load(directory)
    record("loaded", iteration)
    first = iteration + 1
    if fault("bar"):
        draw_bar()
    peers.most(0)
    if RANK == 0:
        log(f"[before the start of training step] datetime: {timestamp()} ")
    while iteration < args.train_iters:
        if fault("exit-0"):
            return 0
        for code in (3, 77):
            if fault(f"exit-{code}"):  # as a library that gives up: without a traceback
                os._exit(code)
        if fault("disconnect"):
            for link in peers.links:
                link.shutdown(socket.SHUT_RDWR)
        if fault("raise"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault("memory"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault("noise"):
            noise()
        if fault("progress-bar"):
            draw_bar()
        while fault("hang"):
            time.sleep(3600)
        has_nan = fault("nan-exit") or fault(f"nan-exit.at{iteration + 1}")
        if has_nan:
            log(
                f"ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank {RANK} at iteration "
                f"#{iteration + 1} invocation #1 (message='found NaN in local forward loss calculation')"
            )
        if peers.most(int(has_nan)):  # as Megatron-LM, which lets another GPU repeat the iteration
            save(peers, directory, iteration, total)
            return 16
        started = time.monotonic()
        time.sleep(STEP)
        iteration += 1
        total += peers.most(iteration)
        record("trained", iteration)
        nan = fault("nan")
        if RANK == WORLD - 1 and (iteration % args.log_interval == 0 or iteration == first):
            loss = math.nan if nan else 10 / iteration
            milliseconds = 1000 * (time.monotonic() - started)
            log(
                f" [{timestamp()}] iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: "
                f"{iteration * args.global_batch_size:12d} | elapsed time per iteration (ms): {milliseconds:.1f} | "
                f"throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: {args.lr:.6E} | "
                f"global batch size: {args.global_batch_size:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | "
                f"grad norm: {1 / iteration:.3f} | number of skipped iterations:   0 | "
                f"number of nan iterations:   {nan:d} |"
            )
            if args.timing_log_level == 2:
                log("(min, max) time across ranks (ms):")
                wait = f"({milliseconds / 20:.2f}, {milliseconds / 10:.2f})"
                log(f"    batch-generator ................................: {wait}")
        stop = peers.most(len(signals) + fault("leave"))
        ends = iteration in transitions or (args.exit_interval and iteration % args.exit_interval == 0)
        if iteration % args.save_interval == 0 or iteration == args.train_iters or stop or ends:
            save(peers, directory, iteration, total)
        if ends:
            if RANK == 0:
                log(f"[exiting program at iteration {iteration}] datetime: {timestamp()} ")
            return 0
        if stop:
            if RANK == 0:
                log(f"[exiting program after receiving SIGTERM.] datetime: {timestamp()} ")
            return 0
    return int(fault("fail-after-the-end"))


if __name__ == "__main__":
    sys.exit(main())
