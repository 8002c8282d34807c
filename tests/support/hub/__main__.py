"""Serve DIR/datasets/ORG/NAME/** and DIR/models/ORG/NAME/** as a Hub: `python -m support.hub DIR`."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from tokenmill.errors import RequestError, TokenmillError

from .faults import FaultPlan
from .server import Hub


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command_line = argparse.ArgumentParser(prog="python -m support.hub", description="Serve a directory as a Hub.")
    command_line.add_argument("dir", type=Path, help="directory with datasets/ORG/NAME/... and models/ORG/NAME/...")
    command_line.add_argument("--host", default="127.0.0.1", help="address to listen on")
    command_line.add_argument("--port", type=int, default=0, help="port of the Hub; 0 selects a free port")
    command_line.add_argument("--cdn-port", type=int, default=0, help="port of the CDN; 0 selects a free port")
    command_line.add_argument("--public-host", help="host name that clients use, if it is not --host")
    command_line.add_argument("--token", help="refuse requests without this token")
    command_line.add_argument("--faults", type=Path, metavar="FILE", help="JSON list of faults")
    return command_line


def fill(hub: Hub, root: Path) -> None:
    """Add every repository of a directory; raise RequestError if the directory contains no repository."""
    has_repository = False
    for folder, add in (("datasets", hub.add_dataset), ("models", hub.add_model)):
        for repo in sorted(path for path in (root / folder).glob("*/*") if path.is_dir()):
            files = {path.relative_to(repo).as_posix(): path for path in repo.rglob("*") if path.is_file()}
            add(repo.relative_to(root / folder).as_posix(), files)
            has_repository = True
    if not has_repository:
        raise RequestError(f"{root}: nothing to serve; put files under {root}/datasets/ORG/NAME/")


def stop(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt the wait for a signal."""
    raise KeyboardInterrupt


def main() -> int:
    """Print `HF_ENDPOINT=...`, the setting for a client's command line, and serve until SIGTERM or Ctrl-C."""
    arguments = parser().parse_args()
    hub = Hub(
        host=arguments.host,
        port=arguments.port,
        cdn_port=arguments.cdn_port,
        public_host=arguments.public_host,
        token=arguments.token,
    )
    signal.signal(signal.SIGTERM, stop)
    try:
        if arguments.faults:
            hub.faults = FaultPlan.from_json(arguments.faults)
        fill(hub, arguments.dir)
        with hub:
            print(f"HF_ENDPOINT={hub.endpoint}", flush=True)
            while True:
                signal.pause()
    except TokenmillError as error:
        print(f"testhub: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"testhub: {arguments.host}:{arguments.port}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
