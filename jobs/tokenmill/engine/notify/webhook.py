"""Send a message to a webhook: HTTP POST, with retries in a limited time.

The address of a webhook is often its only credential, so no message of this module contains more of it than the host.
"""

import os
import ssl
from urllib.parse import urlsplit

import requests
from requests.utils import get_environ_proxies

from tokenmill.core.files.credential_files import check_certificates
from tokenmill.engine.notify.delivery import DeliveryFailure, deliver, temporary_pause
from tokenmill.errors import RequestError

CONNECT_SECONDS = 3.0
READ_SECONDS = 5.0


def post(url: str, body: bytes, deadline: float) -> None:
    """Send a JSON message to a URL; the last request starts before the `deadline` of the monotonic clock.

    A redirect is a failure: another host might receive the message, and the credentials in the address.

    Raises:
        DeliveryFailure: the receiver did not accept the message.
    """
    with requests.Session() as session:
        session.trust_env = False  # no login from ~/.netrc; the environment's proxies and certificates are set here
        session.proxies.update(get_environ_proxies(url))
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        if url.startswith("https:"):
            try:
                check_certificates()
            except RequestError as problem:
                raise DeliveryFailure(str(problem)) from None
        deliver(lambda: _post_once(session, url, body), deadline)


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
        raise DeliveryFailure(_innermost(error)) from None
    except requests.ReadTimeout:
        raise DeliveryFailure(f"it did not respond within {READ_SECONDS:.0f} s", undelivered=False) from None
    except requests.ConnectTimeout:
        raise DeliveryFailure(
            f"no connection within {CONNECT_SECONDS:.0f} s (a network policy or a firewall may forbid it)", pause=0.0
        ) from None
    except requests.ConnectionError as error:
        raise DeliveryFailure(_innermost(error), pause=0.0) from None
    except (requests.RequestException, ValueError, OSError) as error:
        raise DeliveryFailure(_innermost(error)) from None
    response.close()
    code = response.status_code
    if 300 <= code < 400:
        target = urlsplit(response.headers.get("Location", "")).hostname or "another address"
        raise DeliveryFailure(f"it redirects to {target}, which gets no message")
    if not 200 <= code < 300:
        raise DeliveryFailure(f"it responded {code}", pause=temporary_pause(code, response.headers))


def _innermost(error: BaseException) -> str:
    """Return the text of the first error of a chain; the texts of the others contain the address."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
