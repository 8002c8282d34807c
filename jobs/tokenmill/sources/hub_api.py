"""Call the Hub's API, retry while the Hub is down or limits requests, and turn refusals into messages.

`sources.hub` lists datasets through it, and `tokenize.tokenizer_files` fetches tokenizers. The responses are two JSON
documents. huggingface_hub takes longer to import than such a request takes, and it retries only some of its calls.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from tokenmill.core.files.credential_files import check_named_file
from tokenmill.core.redaction import contains_sent_credential, register_address_secrets, register_secrets
from tokenmill.core.typed_json import JsonObject
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, TransientError
from tokenmill.sources.retry import MAX_MISSING_RESPONSES, FailureCounts, RetryableError, RetryPolicy, retry_call
from tokenmill.sources.transfer import Transfer

MAX_INVALID_RESPONSES = 6
"""Consecutive invalid responses before the call fails: about one minute."""
MAX_LINK_REFUSALS = 3
"""Consecutive refusals of a file's address before the call fails: a signed link may have expired."""

_SHA256 = re.compile("[0-9a-f]{64}")
_GIT_HASH = re.compile("[0-9a-f]{40}")
MAX_FILE_BYTES = 1 << 53
"""Largest file size that a listing may contain: JSON numbers are exact up to this value."""

T = TypeVar("T")


def hub_endpoint(endpoint: str | None) -> str:
    """Return the Hub's address: `endpoint`, else HF_ENDPOINT, else the public Hub."""
    address = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    register_address_secrets(address)
    if not address.startswith(("https://", "http://")):
        display_address = address.rpartition("@")[2]
        raise RequestError(
            f"invalid Hub endpoint {display_address!r}: it must start with https:// (set --endpoint or HF_ENDPOINT)"
        )
    return address


def authorization_headers() -> dict[str, str]:
    """Return the header with the access token (HF_TOKEN); empty without a token."""
    token = _token()
    register_secrets(token)
    if token and not (token.isascii() and token.isprintable()):
        raise RequestError(
            "the access token contains characters that no token has, such as typographic quotation marks; correct "
            "HF_TOKEN"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token() -> str | None:
    """Return the access token that huggingface_hub would use.

    huggingface_hub is imported only when it may read the token from a place that this function does not read.
    """
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if "HF_OIDC_RESOURCE" not in os.environ and "google.colab" not in sys.modules:
        if token:
            return token.strip() or None
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
        path = os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
        file = Path(path).expanduser()
        if not file.exists():
            return None
        if os.environ.get("HF_TOKEN_PATH"):
            check_named_file("HF_TOKEN_PATH", str(file))
    from huggingface_hub import get_token

    return get_token()


class HubApi:
    """The Hub's API for one repository; `kind` is "datasets" or "models"."""

    def __init__(self, transfer: Transfer, endpoint: str, kind: str, name: str) -> None:
        """Store the repository's address without sending a request."""
        self._transfer = transfer
        self._api = f"{endpoint}/api/{kind}/{quote(name, safe='/')}"

    def resolve_commit(self, revision: str) -> str:
        """Return the commit of a branch, a tag or a commit."""
        response, _ = self._get(f"{self._api}/revision/{quote(revision, safe='')}?expand=sha")
        if not isinstance(response, dict) or not isinstance(response.get("sha"), str) or not response["sha"]:
            raise ValueError("the response contains no commit")
        return str(response["sha"])

    def list_files(self, commit: str, folder: str | None = None, *, recursive: bool) -> list[RemoteFile]:
        """List the files with their sizes and hashes; one invalid entry makes the listing invalid (ValueError)."""
        path = f"/{quote(folder, safe='', errors='surrogatepass')}" if folder else ""
        url: str | None = f"{self._api}/tree/{commit}{path}?recursive={json.dumps(recursive)}&expand=false"
        files: dict[str, RemoteFile] = {}
        visited_urls = set()
        while url:
            visited_urls.add(url)
            page, url = self._get(url)
            try:
                for file in [_parse_file(item) for item in page if item["type"] == "file"]:
                    if file.path in files:
                        raise ValueError(f"it contains {file.path!r} twice")
                    files[file.path] = file
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"the listing is invalid ({type(error).__name__}: {error})") from error
            if url in visited_urls:
                raise ValueError("the listing is invalid (a page links to an earlier page)")
        return list(files.values())

    def xet_connection(self, commit: str) -> dict[str, object]:
        """Return the address of the repository's Xet storage and a token, as the arguments of hf_xet."""
        url = f"{self._api}/xet-read-token/{commit}"
        body = self._transfer.open(url, authorization_headers())
        body.read()  # the body contains the same values as JSON
        headers = body.headers
        register_secrets(headers["X-Xet-Access-Token"])
        return {
            "endpoint": headers["X-Xet-Cas-Url"],
            "token": headers["X-Xet-Access-Token"],
            "token_expiry_unix_secs": int(headers["X-Xet-Token-Expiration"]),
            "token_refresh_url": url,
            "token_refresh_headers": authorization_headers(),
        }

    def _get(self, url: str) -> tuple[Any, str | None]:
        """Return the JSON of a response, and the address of its next page."""
        # The next page may be on another host, for example behind a mirror. That host must not receive the token.
        is_own_url = url.startswith(self._api)
        body = self._transfer.open(url, authorization_headers() if is_own_url else {})
        response = body.read()
        # The token would be written into the plan, or be part of a file name.
        if contains_sent_credential(response.decode("utf-8", "replace")):
            raise RequestError(
                f"the response of {self._api} contains the access token of the request: it is not trusted, and nothing "
                "was recorded; check --endpoint (HF_ENDPOINT)"
            )
        return json.loads(response), body.links.get("next", {}).get("url")


def _parse_file(item: JsonObject) -> RemoteFile:
    path, size, lfs = item["path"], item["size"], item.get("lfs")
    content_hash, pattern = (lfs["oid"], _SHA256) if lfs else (item["oid"], _GIT_HASH)
    is_size_valid = type(size) is int and 0 <= size <= MAX_FILE_BYTES and (not lfs or lfs.get("size", size) == size)
    if (
        not isinstance(path, str)
        or not is_size_valid
        or not isinstance(content_hash, str)
        or not pattern.fullmatch(content_hash)
    ):
        raise TypeError(f"{path!r} has size {size!r} and hash {content_hash!r}")
    if not lfs:
        return RemoteFile(path, size, git_sha1=content_hash)
    xet = item.get("xetHash")
    return RemoteFile(
        path, size, sha256=content_hash, xet=xet if isinstance(xet, str) and _SHA256.fullmatch(xet) else None
    )


def call_hub(
    call: Callable[[], T],
    subject: str,
    policy: RetryPolicy,
    *,
    revision: str,
    fallback_hint: str = "",
    links: bool = False,
) -> T:
    """Return the result of a call to the Hub about `subject` ("the dataset ORG/NAME"), with retries.

    Messages use `revision`, the requested revision, and `fallback_hint`, the alternative without the Hub. `links`: the
    call fetches a file, whose signed link may be refused for a while. Raises RequestError when a retry cannot help.
    Raises TransientError after the policy's deadline, or when the Hub does not respond.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise RequestError(f"{subject} is on the Hub, and HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE{fallback_hint}")

    def validated_call() -> T:
        try:
            return call()
        except ValueError as error:  # the response is not JSON, or has unexpected content
            raise RetryableError(str(error) or type(error).__name__, invalid=True) from error

    def reason(failure: RetryableError) -> str:
        return (str(failure).strip().splitlines() or ["no reason"])[0][:300]

    def permanent_error(failure: RetryableError, counts: FailureCounts) -> Exception | None:
        if failure.refused and (not links or counts.refused == MAX_LINK_REFUSALS):
            return RequestError(_refusal_message(failure.code, subject, reason(failure), revision, fallback_hint))
        problem = ""
        if counts.invalid == MAX_INVALID_RESPONSES:
            problem = f"the Hub's response for {subject} is still invalid after several attempts"
        elif counts.no_response == MAX_MISSING_RESPONSES:
            problem = f"could not reach the Hub for {subject}"
        return (
            TransientError(f"{problem}: {reason(failure)}; run the same command again{fallback_hint}")
            if problem
            else None
        )

    return retry_call(
        validated_call,
        policy,
        describe=lambda failure: f"the Hub did not return {subject}: {reason(failure)}",
        permanent_error=permanent_error,
    )


def _refusal_message(code: str, subject: str, reason: str, revision: str, fallback_hint: str) -> str:
    """Return the message for a refusal with the Hub's error code `code` (X-Error-Code)."""
    if code == "GatedRepo":
        return (
            f"{subject} is gated: accept its terms on its page with the account of your access token, and set HF_TOKEN"
        )
    if code == "RevisionNotFound":
        return f"{subject} has no revision {revision}; check its branches, tags and commits"
    if code == "EntryNotFound":
        return f"{subject} has no such folder or file at this revision; check the path"
    if code == "RepoNotFound" and _token():
        return (
            f"{subject} does not exist on the Hub, or the account of your access token has no access to it: check the "
            f"name, request access with this account, or set HF_TOKEN to another token{fallback_hint}"
        )
    if code == "RepoNotFound":
        return (
            f"{subject} does not exist on the Hub, or it is private: check the name, or set HF_TOKEN to the token of "
            f"an account with access{fallback_hint}"
        )
    return f"the Hub refused {subject}: {reason}; check the name, and check that HF_TOKEN has read access"
