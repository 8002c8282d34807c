"""A program that renders chat templates under the limits of an encoder process, each in a process of its own.

The limit of the CPU time is a tenth of the usual one.

It reads a JSON list of sources from standard input, and writes a JSON list of Outcomes as dictionaries.
"""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

MESSAGES = [{"role": "user", "content": "Hello there."}, {"role": "assistant", "content": "Hello."}]


class Outcome(NamedTuple):
    """How the process of one template ended: `end` is "rendered", the class of an error, or the number of a signal."""

    source: str
    end: str | int
    reason: str
    cpu_seconds: float
    memory_mib: float


def render_limited(sources: list[str], renders: int = 3) -> list[Outcome]:
    """Render each template so many times under the limits."""
    command = [sys.executable, __file__, str(renders)]
    program = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, check=True)
    return [Outcome(*values) for values in json.loads(program.stdout)]


def _render(source: str) -> tuple[str, str]:
    from tokenmill.errors import RequestError
    from tokenmill.stages.chat.template import ChatTemplate, RenderError

    try:
        template = ChatTemplate(source, name="t.jinja")
        for _ in range(int(sys.argv[1])):
            template.render(MESSAGES)
    except (RenderError, RequestError) as error:
        return type(error).__name__, str(error)
    return "rendered", ""


def main() -> None:
    """Render the templates of standard input."""
    from tokenmill.stages.chat import limits

    limits.MAX_CPU_SECONDS /= 10
    outcomes: list[Any] = []
    for source in json.load(sys.stdin):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            limits.enforce_limits()
            os.write(writer, json.dumps(_render(source)).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            data = pipe.read()
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        end, reason = json.loads(data) if data else (-code, "")
        outcomes.append((source, end, reason, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
