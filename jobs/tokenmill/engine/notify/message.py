"""The content of an announcement at the end of a stage or run, and its form for each receiver."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tokenmill import __version__
from tokenmill.core.redaction import redact

Outcome = Literal["succeeded", "failed", "hanging"]

MAX_MESSAGE_CHARACTERS = 2000
"""Characters of a message; the receivers limit the size of a request."""
OBJECT_VARIABLE = "TOKENMILL_NOTIFY_OBJECT"
"""Variable with the object that runs the pods, as API version, kind and name: batch/v1/Job/NAME."""

_TITLES: dict[Outcome, str] = {"succeeded": "succeeded", "failed": "failed", "hanging": "hangs"}
_COLORS: dict[Outcome, str] = {"succeeded": "good", "failed": "attention", "hanging": "warning"}


def _redacted(text: str) -> str:
    text = redact(text)
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]} ..."


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """The end of a stage or run, or a hang. The fields are those of the JSON message; its text is redacted."""

    outcome: Outcome
    subject: str
    """The stage or run: `preprocess`, or `training run NAME`."""
    message: str
    output: str
    """Directory of the output, or of the checkpoints."""
    exit_code: int | None = None
    """Exit code of the process; None while it runs."""
    run: str | None = None
    object: str = field(default_factory=lambda: os.environ.get(OBJECT_VARIABLE, ""))
    """The Job or run of Kubernetes; empty outside of a cluster."""
    namespace: str = field(default_factory=lambda: os.environ.get("TOKENMILL_NAMESPACE", ""))
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    version: str = __version__

    def __post_init__(self) -> None:
        """Remove credentials from the texts, and limit their length."""
        for name in ("message", "output", "subject"):
            object.__setattr__(self, name, _redacted(getattr(self, name)))

    @property
    def title(self) -> str:
        """Return the subject and the outcome, such as `preprocess failed`."""
        return f"{self.subject} {_TITLES[self.outcome]}"

    @property
    def place(self) -> str:
        """Return where it happened: the object with its namespace, or the host."""
        _, _, name = self.object.rpartition("/")
        return f"{self.namespace}/{name} ({self.host})" if name else self.host


def _encode_json(announcement: Announcement) -> bytes:
    return msgspec.json.encode({"event": "announcement", **msgspec.to_builtins(announcement)})


def _encode_slack(announcement: Announcement) -> bytes:
    # Slack reads <!channel> and <URL|text> as markup: https://docs.slack.dev/messaging/formatting-message-text
    def escape(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    text = f"*{escape(announcement.title)}*: {escape(announcement.message)}\n{escape(announcement.place)}"
    return msgspec.json.encode({"text": text})


def _encode_teams(announcement: Announcement) -> bytes:
    """Return an Adaptive Card for a workflow of Microsoft Teams that posts the requests of a webhook."""
    title = {"type": "TextBlock", "text": announcement.title, "weight": "bolder", "wrap": True}
    title["color"] = _COLORS[announcement.outcome]
    texts = [{"type": "TextBlock", "text": text, "wrap": True} for text in (announcement.message, announcement.place)]
    card = {"type": "AdaptiveCard", "version": "1.4", "body": [title, *texts]}
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return msgspec.json.encode({"type": "message", "attachments": [attachment]})


TEMPLATES: dict[str, Callable[[Announcement], bytes]] = {
    "json": _encode_json,
    "slack": _encode_slack,
    "teams": _encode_teams,
}
"""The body of a request by the name of its template."""
