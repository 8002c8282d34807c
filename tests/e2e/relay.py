"""A way to the API server for pods of a cluster without a network for Services: a TLS server of this machine.

TOKENMILL_E2E_RELAY is the address of this machine for the pods. The relay has its own certificate, and forwards the
decrypted bytes of each connection to the API server of the kubeconfig.
"""

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from e2e.cluster import Namespace
from support.receiver import make_certificate

DIRECTORY = "/relay"


@contextmanager
def relaying(namespace: Namespace, scratch: Path) -> Iterator[str]:
    """Serve the relay, if the cluster needs one; return the arguments of Helm with which the pods use it."""
    host = os.environ.get("TOKENMILL_E2E_RELAY", "")
    if not host:
        yield ""
        return
    config = json.loads(namespace.admin.check("kubectl config view --raw --minify -o json"))
    api = urlsplit(config["clusters"][0]["cluster"]["server"])
    certificate = make_certificate(scratch / "relay.pem", host)
    ca = Path(f"{certificate}.crt").read_text()
    namespace.admin.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "relay"}, "data": {"ca.crt": ca}}
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=forward, args=(connection,), daemon=True).start()

        def forward(connection: socket.socket) -> None:
            with suppress(OSError), server.wrap_socket(connection, server_side=True) as near:
                far = client.wrap_socket(socket.create_connection((api.hostname or "", api.port or 443)))
                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                copy(near, far)

        threading.Thread(target=serve, daemon=True).start()
        yield _values(host, port)


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the end of a connection."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _values(host: str, port: int) -> str:
    variables = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": str(port),
        "TOKENMILL_NOTIFY_API": DIRECTORY,
    }
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
        {"configMap": {"name": "relay", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    values = {
        "extraEnv": [{"name": name, "value": value} for name, value in variables.items()],
        "extraVolumes": [{"name": "relay", "projected": {"sources": sources}}],
        "extraVolumeMounts": [{"name": "relay", "mountPath": DIRECTORY, "readOnly": True}],
    }
    return "".join(f" --set-json '{key}={json.dumps(value)}'" for key, value in values.items())
