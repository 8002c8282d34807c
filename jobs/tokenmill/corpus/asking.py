"""Ask the Hub something, again while it is down or limits us, and word its refusals for a person.

Used for the listings of datasets (`corpus.hub`) and for tokenizers (`tokens.origin`); the client library
retries some of its calls and not others.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from tokenmill.corpus.source import Patience, Retry
from tokenmill.corpus.transfer import REFUSALS, pause, told_to_wait
from tokenmill.errors import RequestError, TransientError

UNREACHABLE = 4
"""Tries without any answer before the network is taken to be down: half a minute."""

T = TypeVar("T")


def hub_address(endpoint: str | None) -> str:
    """Return the Hub's address: the one given, else HF_ENDPOINT's, else the public one."""
    address = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not address.startswith(("https://", "http://")):
        raise RequestError(f"the Hub's address {address!r} is none; write --endpoint (HF_ENDPOINT) with https://")
    return address


def authorization() -> dict[str, str]:
    """Return the header that carries the access token (HF_TOKEN), if there is one."""
    from huggingface_hub import get_token

    token = get_token()
    if token and not (token.isascii() and token.isprintable()):
        raise RequestError("the access token holds what no token has, such as quotation marks; mend HF_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask(question: Callable[[], T], what: str, patience: Patience, *, revision: str, otherwise: str = "") -> T:
    """Return the answer to a question about `what` ("the dataset ORG/NAME").

    For messages, `revision` is what was asked for and `otherwise` what one can do without the Hub. Raises
    RequestError for what asking again cannot change, TransientError when patience ends or nothing answers.
    """
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    attempt = silent = refused = 0
    while True:
        attempt += 1
        try:
            return question()
        except OfflineModeIsEnabled as error:
            raise RequestError(f"{what} is on the Hub, and HF_HUB_OFFLINE is set; unset it{otherwise}") from error
        except GatedRepoError as error:
            raise RequestError(
                f"{what} is gated: accept its terms on its page with the account whose token you use, and set HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            raise RequestError(f"{what} has no revision {revision}; look at its branches, tags and commits") from error
        except EntryNotFoundError as error:
            raise RequestError(f"{what} has no such folder or file at this revision") from error
        except RepositoryNotFoundError as error:
            raise RequestError(
                f"the Hub does not know {what}, or hides it from this account: check the name, or "
                f"set HF_TOKEN{otherwise}"
            ) from error
        except (HTTPError, OSError, ValueError, Retry) as error:  # ValueError: an answer that is no JSON
            response: Any = getattr(error, "response", None)
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            final = isinstance(error, HFValidationError)
            final |= isinstance(error, HfHubHTTPError) and response.status_code in REFUSALS
            # A signed link may have expired: what refuses a file is asked again, where to find it too.
            refused += isinstance(error, Retry) and error.refused
            if final or refused == 3:
                raise RequestError(
                    f"the Hub refused {what}: {said}; check the name, and that HF_TOKEN may read it"
                ) from error
            silent += response is None and not isinstance(error, (Retry, ValueError))
            if silent == UNREACHABLE:
                raise TransientError(
                    f"could not reach the Hub for {what}: {said}; run the same command again{otherwise}"
                ) from error
            told = told_to_wait(response.headers) if response is not None else getattr(error, "after", None)
            patience.wait(pause(attempt, told), f"the Hub did not give {what}: {said}")
