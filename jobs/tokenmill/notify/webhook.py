"""Send a message to a webhook: HTTP POST, with retries in a limited time.

The address of a webhook is often its only credential, so no message of this module contains more of it than the host.
"""

import os
import ssl
import time
from urllib.parse import urlsplit

import requests
from requests.utils import get_environ_proxies

CONNECT_SECONDS = 3.0
READ_SECONDS = 5.0
RETRY_SECONDS = (0.5, 1.5)
"""Pauses before the second and third request."""
_RETRYABLE = (429, 500, 502, 503, 504)


class WebhookFailure(Exception):
    """The receiver did not accept a message; the text is the reason.

    `undelivered` means that the receiver certainly did not get the message.
    """

    def __init__(self, reason: str, *, undelivered: bool) -> None:
        super().__init__(reason)
        self.undelivered = undelivered


def post(url: str, body: bytes, deadline: float) -> None:
    """Send a JSON message to a URL; the last request starts before the `deadline` of the monotonic clock.

    A redirect is a failure: another host might receive the message, and the credentials in the address.

    Raises:
        WebhookFailure: the receiver did not accept the message.
    """
    with requests.Session() as session:
        session.trust_env = False  # no login from ~/.netrc; the environment's proxies and certificates are set here
        session.proxies.update(get_environ_proxies(url))
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        for pause in RETRY_SECONDS:
            try:
                return _post_once(session, url, body)
            except _RetryableFailure as failure:
                wait = max(pause, failure.seconds)
                if time.monotonic() + wait >= deadline:
                    raise
            time.sleep(wait)
        _post_once(session, url, body)


class _RetryableFailure(WebhookFailure):
    """The receiver may accept the next request, after some seconds."""

    def __init__(self, reason: str, *, undelivered: bool, seconds: float = 0.0) -> None:
        super().__init__(reason, undelivered=undelivered)
        self.seconds = seconds


def _post_once(session: requests.Session, url: str, body: bytes) -> None:
    try:
        response = session.post(
            url,
            data=body,
            headers={"Content-Type": "application/json", "User-Agent": "tokenmill"},
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            allow_redirects=False,
            stream=True,  # nothing reads the content, which may be large or slow
        )
    except requests.exceptions.SSLError as error:
        raise WebhookFailure(_innermost(error), undelivered=True) from None
    except requests.ReadTimeout:
        raise WebhookFailure(f"it did not respond within {READ_SECONDS:.0f} s", undelivered=False) from None
    except requests.ConnectTimeout:
        raise _RetryableFailure(
            f"no connection within {CONNECT_SECONDS:.0f} s (a network policy or a firewall may forbid it)",
            undelivered=True,
        ) from None
    except requests.ConnectionError as error:
        raise _RetryableFailure(_innermost(error), undelivered=True) from None
    except (requests.RequestException, ValueError, OSError) as error:
        raise WebhookFailure(_innermost(error), undelivered=True) from None
    response.close()
    code = response.status_code
    if code in _RETRYABLE:
        seconds = response.headers.get("Retry-After", "")
        raise _RetryableFailure(
            f"it responded {code}", undelivered=True, seconds=float(seconds) if seconds.isdecimal() else 0.0
        )
    if 300 <= code < 400:
        target = urlsplit(response.headers.get("Location", "")).hostname or "another address"
        raise WebhookFailure(f"it redirects to {target}, which gets no message", undelivered=True)
    if not 200 <= code < 300:
        raise WebhookFailure(f"it responded {code}", undelivered=True)


def _innermost(error: BaseException) -> str:
    """Return the text of the first error of a chain; the texts of the others contain the address."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
