"""Record an announcement as an Event of Kubernetes, which `kubectl describe` shows with the Job or run.

The chart mounts a token for the API of the cluster into the pods that may do so (`notify.event`), and the certificate
of the API server. The token belongs to an account that may create Events and read this one object.
"""

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import requests

from tokenmill.core.typed_json import decode_json
from tokenmill.engine.notify.delivery import DeliveryFailure, deliver, temporary_pause
from tokenmill.engine.notify.message import OBJECT_VARIABLE, Announcement, Outcome

MAX_EVENT_BYTES = 1000
"""Bytes of an Event's message; the API server accepts 1,024 bytes."""
REQUEST_SECONDS = 5.0

_REASONS: dict[Outcome, tuple[str, str]] = {
    "succeeded": ("Normal", "Succeeded"),
    "failed": ("Warning", "Failed"),
    "hanging": ("Warning", "Hanging"),
}


class _ApiMetadata(msgspec.Struct):
    uid: str


class _ApiObject(msgspec.Struct):
    metadata: _ApiMetadata


class EventSubject(NamedTuple):
    """The object that an Event is about."""

    api_version: str
    kind: str
    name: str

    def path(self, namespace: str) -> str:
        """Return the path of the object in the API."""
        return f"/apis/{self.api_version}/namespaces/{namespace}/{self.kind.lower()}s/{self.name}"


def read_object(text: str) -> EventSubject | None:
    """Return the object of a text such as batch/v1/Job/NAME, None if the text has another form."""
    parts = text.split("/")
    return EventSubject(f"{parts[0]}/{parts[1]}", parts[2], parts[3]) if len(parts) == 4 and all(parts) else None


def record_event(announcement: Announcement, directory: Path, deadline: float) -> None:
    """Record an announcement as an Event of its object; `directory` has `token` and `ca.crt`.

    The last attempt starts before the `deadline` of the monotonic clock.

    Raises:
        DeliveryFailure: the API server did not accept the Event.
    """
    about = read_object(announcement.object)
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if about is None or not host or not announcement.namespace:
        raise DeliveryFailure(f"{OBJECT_VARIABLE}, TOKENMILL_NAMESPACE or KUBERNETES_SERVICE_HOST is not set")
    server = f"https://{f'[{host}]' if ':' in host else host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    name = f"{about.name}.{secrets.token_hex(8)}"  # the same in each attempt, so that there is one Event
    try:
        token = (directory / "token").read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeliveryFailure(f"cannot read the token: {error}") from None
    with requests.Session() as session:
        session.trust_env = False  # the API server is in the cluster: no proxy
        session.verify = str(directory / "ca.crt")
        session.headers["Authorization"] = f"Bearer {token}"
        deliver(lambda: _record_once(session, server, announcement, about, name), deadline)


def _record_once(
    session: requests.Session, server: str, announcement: Announcement, about: EventSubject, name: str
) -> None:
    try:
        uid = _read_uid(session, server + about.path(announcement.namespace))
        response = session.post(
            f"{server}/api/v1/namespaces/{announcement.namespace}/events",
            data=_encode(announcement, about, name, uid),
            headers={"Content-Type": "application/json"},
            timeout=REQUEST_SECONDS,
            allow_redirects=False,
        )
    except requests.exceptions.SSLError as error:
        raise DeliveryFailure(type(error).__name__) from None
    except (requests.ConnectionError, requests.Timeout) as error:
        raise DeliveryFailure(type(error).__name__, pause=0.0) from None
    except requests.RequestException as error:
        raise DeliveryFailure(type(error).__name__) from None
    except OSError as error:
        raise DeliveryFailure(f"cannot read the certificate of the API server: {error}") from None
    code = response.status_code
    if code not in (201, 409):  # 409: an attempt without a response created the Event
        raise DeliveryFailure(f"the API server responded {code}", pause=temporary_pause(code, response.headers))


def _read_uid(session: requests.Session, address: str) -> str | None:
    """Return the uid of the object, by which `kubectl describe` selects Events; None if it cannot be read."""
    response = session.get(address, timeout=REQUEST_SECONDS, allow_redirects=False)
    if response.status_code != 200:
        return None
    try:
        return decode_json(response.content, _ApiObject).metadata.uid
    except msgspec.MsgspecError:
        return None


def _encode(announcement: Announcement, about: EventSubject, name: str, uid: str | None) -> bytes:
    kind, reason = _REASONS[announcement.outcome]
    now = datetime.fromtimestamp(announcement.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = f"{announcement.title}: {announcement.message}".encode()[:MAX_EVENT_BYTES].decode(errors="ignore")
    involved = {
        "apiVersion": about.api_version,
        "kind": about.kind,
        "name": about.name,
        "namespace": announcement.namespace,
    }
    return msgspec.json.encode(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": announcement.namespace},
            "involvedObject": involved | ({"uid": uid} if uid else {}),
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "tokenmill", "host": announcement.host},
            "reportingComponent": "tokenmill",
            "reportingInstance": announcement.host,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
    )
