"""The process of a framework: `python -m tokenmill.loaders.check.framework_child MODULE:FUNCTION DIRECTORY`.

It reads the request in the directory, reads the samples with the function, and writes their digests there. `frameworks`
starts it.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.loaders.check.framework_readers import Reader, digest_samples
from tokenmill.loaders.check.framework_records import REQUEST, RESPONSE, FrameworkRequest, FrameworkResponse


def main() -> None:
    """Read the samples of the request that the command line names."""
    module, _, function = sys.argv[1].partition(":")
    directory = Path(sys.argv[2])
    request = decode_json((directory / REQUEST).read_bytes(), FrameworkRequest)
    read: Reader = getattr(import_module(module), function)
    digests, refused = {}, {}
    for part in request.parts:
        scratch = directory / part.name
        scratch.mkdir()
        try:
            digests[part.name] = digest_samples(read(request, part, scratch), part.count)
        except RequestError as error:
            refused[part.name] = str(error)
    (directory / RESPONSE).write_bytes(msgspec.json.encode(FrameworkResponse(digests, refused)))
    sys.stdout.flush()
    os._exit(0)  # threads and process groups of a framework may block the end of Python


if __name__ == "__main__":
    main()
