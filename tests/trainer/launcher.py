"""A small torchrun for machines without torch: the same arguments, a session per rank, exit code 1."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

REPORT = """Traceback (most recent call last):
  raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
{}Root Cause (first observed failure):
{}"""
ENTRY = """[0]:
  rank      : {} (local_rank: {})
  exitcode  : {} (pid: 1)\x20
"""


def meet(nodes: int, node_rank: int, address: tuple[str, int], run: str) -> None:
    """Wait for the launchers of all nodes: torchrun starts no rank before its store has a connection of each node.

    Rank 0 needs the TCP port, so this is UDP. Nodes with different ids of the rendezvous never meet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        if node_rank == 0:
            link.bind(("", address[1]))
            others: dict[bytes, tuple[str, int]] = {}
            while len(others) < nodes - 1:
                name, sender = link.recvfrom(256)
                if name.endswith(f" {run}".encode()):
                    others[name] = sender
            for sender in others.values():
                link.sendto(b"start", sender)
            return
        link.settimeout(0.1)
        while True:
            try:
                link.sendto(f"{node_rank} {run}".encode(), address)
                link.recvfrom(16)
                return
            except OSError:  # node 0 has not started, or its name is not known yet
                time.sleep(0.05)


def main() -> int:
    """Start this node's ranks; the first rank that fails stops the others."""
    parser = argparse.ArgumentParser()
    for name, default in (("nnodes", 1), ("nproc_per_node", 1), ("node_rank", 0), ("max_restarts", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("rdzv_id", "rdzv_conf"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--master_addr", default="localhost")
    parser.add_argument("--master_port", type=int, default=0)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    world = options.nnodes * options.nproc_per_node
    if options.standalone:
        with socket.create_server(("localhost", 0)) as free:
            options.master_port = free.getsockname()[1]
    elif options.nnodes > 1:
        meet(options.nnodes, options.node_rank, (options.master_addr, options.master_port), options.rdzv_id)
    ranks = []
    for local in range(options.nproc_per_node):
        environment = os.environ | {
            "RANK": str(options.node_rank * options.nproc_per_node + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": options.master_addr,
            "MASTER_PORT": str(options.master_port),
        }
        command = [sys.executable, options.script, *options.arguments]
        ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def stop(*_: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((local for local, code in enumerate(codes) if code), None)
        if failed is not None:
            stop()
            time.sleep(0.2)
            for rank in ranks:
                rank.kill()
            codes = [rank.wait() for rank in ranks]
            order = [local for local, code in enumerate(codes) if code and local != failed] + [failed]
            first = options.node_rank * options.nproc_per_node
            *others, root = [ENTRY.format(first + local, local, codes[local]) for local in order]
            sys.stderr.write(REPORT.format("".join(others), root))
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
