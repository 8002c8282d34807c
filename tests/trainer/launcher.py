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
Root Cause (first observed failure):
[0]:
  rank      : {} (local_rank: {})
  exitcode  : {} (pid: 1)\x20
"""


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
            sys.stderr.write(REPORT.format(options.node_rank * options.nproc_per_node + failed, failed, codes[failed]))
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
