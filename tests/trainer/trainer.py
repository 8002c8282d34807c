"""A small trainer in Megatron-LM's place: the same arguments, output lines, tracker and checkpoint files.

It adds numbers over its ranks, through gloo where torch is installed, else over TCP. What it does wrong, and when,
is read from $TRAINER_FAULTS, a directory with one file for each fault, taken away by whoever runs into it.
"""

import argparse
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

KINDS = {"int": int, "float": float, "bool": lambda text: text == "true"}
FAULTS = Path(os.environ.get("TRAINER_FAULTS", "/nonexistent"))
STEP = float(os.environ.get("TRAINER_STEP_SECONDS", "0.02"))
SAVE = float(os.environ.get("TRAINER_SAVE_SECONDS", "0"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parser() -> argparse.ArgumentParser:
    """Return a parser of Megatron-LM's arguments: an unknown flag, arity or choice ends with exit code 2."""
    table = json.loads(Path(__file__).with_name("megatron-arguments.json").read_text())["arguments"]
    found = argparse.ArgumentParser(allow_abbrev=False)
    for flag, spec in table.items():
        if flag == "--help":
            continue
        names = [flag, *spec.get("also", [])]
        destination = names[-1].lstrip("-").replace("-", "_")
        if spec["kind"] in ("StoreTrue", "StoreFalse", "BooleanOptional"):
            found.add_argument(*names, dest=destination, action="store_true")
            continue
        choices = [str(each).rpartition(".")[2] for each in spec.get("choices", [])] or None
        kind = KINDS.get(spec.get("type", "str"), str)
        if kind is not str:
            choices = [kind(each) for each in choices] if choices else None
        extra = {"nargs": spec["nargs"]} if "nargs" in spec else {}
        found.add_argument(*names, dest=destination, type=kind, choices=choices, **extra)  # type: ignore[arg-type]
    return found


class Peers:
    """Maxima over all ranks: a lost one is an error on every other, as in a collective operation."""

    def __init__(self) -> None:
        """Meet at MASTER_ADDR:MASTER_PORT."""
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
        if RANK == 0:
            value = max([value, *map(receive, self.links)])
        for link in self.links:
            link.sendall(struct.pack("<q", value))
        return value if RANK == 0 or not self.links else receive(self.links[0])


class Gloo:
    """The same through torch.distributed."""

    def __init__(self) -> None:
        """Meet where torchrun says."""
        import datetime

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
    """Read one value."""
    data = link.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("Connection closed by peer")
    return int(struct.unpack("<q", data)[0])


def fault(name: str) -> bool:
    """Tell whether a fault is due here, and take it away."""
    for file in (FAULTS / name, FAULTS / f"{name}.rank{RANK}"):
        try:
            file.unlink()
        except OSError:
            continue
        return True
    return any((FAULTS / f"{each}.always").exists() for each in (name, f"{name}.rank{RANK}"))


def pickled(value: Any) -> bytes:
    """Pickle by hand what .metadata holds, whose classes are not there without torch; (class, fields) is an object."""
    if value is None:
        return b"N"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value)) + value.encode()
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(key) + pickled(each) for key, each in value.items()) + b"u"
    (module, name), fields = value
    return f"c{module}\n{name}\n".encode() + b")\x81" + pickled(dict(fields)) + b"b"


def metadata(sizes: dict[str, int]) -> bytes:
    """Return what torch.distributed.checkpoint leaves in .metadata."""
    module = "torch.distributed.checkpoint.metadata"
    entries = {}
    for number, (name, size) in enumerate(sorted(sizes.items())):
        index = ((module, "MetadataIndex"), (("fqn", f"model.{number}"), ("offset", None), ("index", None)))
        stretch = (("relative_path", name), ("offset", 0), ("length", size))
        entries[index] = (("torch.distributed.checkpoint.filesystem", "_StorageInfo"), stretch)
    whole = (("state_dict_metadata", {}), ("planner_data", None), ("storage_data", entries))
    return b"\x80\x02" + pickled(((module, "Metadata"), whole)) + b"."


def save(peers: Any, directory: Path, iteration: int, total: int) -> None:
    """Write a checkpoint in Megatron-LM's order: shards, .metadata, metadata.json, tracker."""
    where = directory / f"iter_{iteration:07d}"
    where.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        say(f"  saving checkpoint at iteration {iteration:7d} to {directory} in torch_dist format")
    shard = json.dumps({"iteration": iteration, "sum": total, "rank": RANK}).encode().ljust(4096)
    (where / f"__{RANK}_0.distcp").write_bytes(shard)
    time.sleep(SAVE)
    peers.most(0)
    if RANK == 0:
        if fault("die-in-save"):
            os.kill(os.getpid(), signal.SIGKILL)
        (where / ".metadata").write_bytes(metadata({f"__{rank}_0.distcp": len(shard) for rank in range(WORLD)}))
        (where / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        tracker = directory / "latest_checkpointed_iteration.txt"
        if fault("torn-tracker"):
            tracker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        tracker.write_text(str(iteration))
        say(f"  successfully saved checkpoint from iteration {iteration:7d} to {directory}")
    peers.most(0)


def load(directory: Path) -> tuple[int, int]:
    """Return the iteration and the sum of the last checkpoint."""
    try:
        if fault("blind"):
            raise FileNotFoundError
        iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
    except OSError:
        say("WARNING: could not find the metadata file; will not load any checkpoints and will start from random")
        return 0, 0
    value = json.loads((directory / f"iter_{iteration:07d}" / "__0_0.distcp").read_bytes())
    return int(value["iteration"]), int(value["sum"])


def say(line: str) -> None:
    """Print a line whole."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def noise() -> None:
    """Write what no log reader likes, and leave the last line open."""
    write = sys.stdout.buffer.write
    write(b"x" * 5_000_000 + b"\n" + bytes(range(256)) * 100 + b"\n")
    for percent in range(1000):
        write(f"\r\x1b[32m{percent / 10:5.1f}%".encode())
    write(b"\n lm loss: nothing | iteration        99999999999999999999999/ 1 | number of nan iterations: many |\n")
    write(b"UserWarning: an Error that is none\nException ignored in: <object>\nTraceback (most recent call last):\n")
    write(b'  File "x.py", line 1, in __del__\nTypeError: NoneType object is not callable\nan open line')
    sys.stdout.flush()


def main() -> int:
    """Train: each iteration adds its number to a sum, so that one lost or done twice shows."""
    if fault("import"):
        raise ImportError("cannot import name 'pretrain' from 'megatron'")
    if fault("slow"):
        time.sleep(60)
    args = parser().parse_args()
    asked: list[int] = []
    gloo = os.environ.get("TRAINER_GLOO") == "1"
    peers: Any = Gloo() if gloo and WORLD > 1 else Peers()
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    if fault("assert"):
        raise AssertionError("the model is not as it should be")
    directory = Path(args.save)
    iteration, total = load(directory)
    first = iteration + 1
    peers.most(0)
    if RANK == 0:
        say(f"[before the start of training step] datetime: {time.strftime('%F %T')} ")
    while iteration < args.train_iters:
        if fault("exit-0"):
            return 0
        if fault("raise"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault("memory"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault("noise"):
            noise()
        while fault("hang"):
            time.sleep(3600)
        begun = time.monotonic()
        time.sleep(STEP)
        iteration += 1
        total += peers.most(iteration)
        if RANK == WORLD - 1 and (iteration % args.log_interval == 0 or iteration == first):
            milliseconds = 1000 * (time.monotonic() - begun)
            say(
                f" [{time.strftime('%F %T')}] iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: "
                f"{iteration * args.global_batch_size:12d} | elapsed time per iteration (ms): {milliseconds:.1f} | "
                f"throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: {args.lr:.6E} | "
                f"lm loss: {10 / iteration:.6E} | number of skipped iterations:   0 | number of nan iterations:   0 |"
            )
        stop = peers.most(len(asked) + fault("leave"))
        if iteration % args.save_interval == 0 or iteration == args.train_iters or stop:
            save(peers, directory, iteration, total)
        if stop:
            if RANK == 0:
                say(f"[exiting program after receiving SIGTERM.] datetime: {time.strftime('%F %T')} ")
            return 0
    return int(fault("fail-after-the-end"))


if __name__ == "__main__":
    sys.exit(main())
