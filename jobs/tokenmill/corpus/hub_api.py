"""Ask the Hub what it has, again while it is down or limits us, and word its refusals for a person.

Used for the listings of datasets (`corpus.hub`) and for tokenizers (`tokens.tokenizer_files`). The answers are two JSON
documents; huggingface_hub would take longer to import than to ask, and retries some of its calls and not others.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from tokenmill.corpus.retry import UNREACHABLE, FailureCounts, RetryableError, RetryPolicy, retrying
from tokenmill.corpus.transfer import Transfer
from tokenmill.errors import RequestError, TransientError
from tokenmill.flow.contract import RemoteFile
from tokenmill.redaction import quotes_credential, remember, remember_address

INVALID = 6
"""Invalid answers in a row before asking again is left to another run: a minute."""
BELIEVED = 3
"""Times that the address of a file is refused before that is believed: a signed link may have expired."""

_SHA256 = re.compile("[0-9a-f]{64}")
_GIT_HASH = re.compile("[0-9a-f]{40}")
LARGEST = 1 << 53
"""Bytes of the largest file that is believed in; a JSON number is exact up to there."""

T = TypeVar("T")


def hub_endpoint(endpoint: str | None) -> str:
    """Return the Hub's address: the one given, else HF_ENDPOINT's, else the public one."""
    address = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    remember_address(address)
    if not address.startswith(("https://", "http://")):
        shown = address.rpartition("@")[2]
        raise RequestError(f"the Hub's address {shown!r} is none; write --endpoint (HF_ENDPOINT) with https://")
    return address


def authorization() -> dict[str, str]:
    """Return the header that carries the access token (HF_TOKEN), if there is one."""
    token = _token()
    remember(token)
    if token and not (token.isascii() and token.isprintable()):
        raise RequestError("the access token holds what no token has, such as quotation marks; mend HF_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token() -> str | None:
    """Return the access token as huggingface_hub finds it, which is asked only where it may find one elsewhere."""
    given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if "HF_OIDC_RESOURCE" not in os.environ and "google.colab" not in sys.modules:
        if given:
            return given.strip() or None
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
        path = os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
        if not Path(path).expanduser().exists():
            return None
    from huggingface_hub import get_token

    return get_token()


class HubApi:
    """The Hub's own answers, for one repository: `kind` is "datasets" or "models"."""

    def __init__(self, transfer: Transfer, endpoint: str, kind: str, name: str) -> None:
        """Ask nothing yet."""
        self._transfer = transfer
        self._api = f"{endpoint}/api/{kind}/{quote(name, safe='/')}"

    def commit(self, revision: str) -> str:
        """Return the commit that a branch, a tag or a commit stands for."""
        answer, _ = self._get(f"{self._api}/revision/{quote(revision, safe='')}?expand=sha")
        if not isinstance(answer, dict) or not isinstance(answer.get("sha"), str) or not answer["sha"]:
            raise ValueError("it gave no commit")
        return str(answer["sha"])

    def files(self, commit: str, folder: str | None = None, *, recursive: bool) -> list[RemoteFile]:
        """List the files with their sizes and hashes; a listing with anything invalid in it is none (ValueError)."""
        path = f"/{quote(folder, safe='', errors='surrogatepass')}" if folder else ""
        url: str | None = f"{self._api}/tree/{commit}{path}?recursive={json.dumps(recursive)}&expand=false"
        files: dict[str, RemoteFile] = {}
        asked = set()
        while url:
            asked.add(url)
            page, url = self._get(url)
            try:
                for file in [_file(item) for item in page if item["type"] == "file"]:
                    if file.path in files:
                        raise ValueError(f"it has {file.path!r} twice")
                    files[file.path] = file
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"its listing is invalid ({type(error).__name__}: {error})") from error
            if url in asked:
                raise ValueError("its listing is invalid (a page leads back to an earlier one)")
        return list(files.values())

    def xet(self, commit: str) -> dict[str, Any]:
        """Return where the repository's Xet storage is and a token for it, as hf_xet names them."""
        url = f"{self._api}/xet-read-token/{commit}"
        body = self._transfer.open(url, authorization())
        body.read()  # the same as JSON
        headers = body.headers
        remember(headers["X-Xet-Access-Token"])
        return {
            "endpoint": headers["X-Xet-Cas-Url"],
            "token": headers["X-Xet-Access-Token"],
            "token_expiry_unix_secs": int(headers["X-Xet-Token-Expiration"]),
            "token_refresh_url": url,
            "token_refresh_headers": authorization(),
        }

    def _get(self, url: str) -> tuple[Any, str | None]:
        """Return an answer, and where its next page is."""
        # A link may lead elsewhere, behind a mirror for one; the token does not go there.
        ours = url.startswith(self._api)
        body = self._transfer.open(url, authorization() if ours else {})
        answer = body.read()
        if quotes_credential(answer.decode("utf-8", "replace")):  # it would stand in the plan, or be a file's name
            raise RequestError(
                f"the answer of {self._api} quotes the access token that it was sent: it is not to be trusted, and "
                "nothing of it was recorded; check --endpoint (HF_ENDPOINT)"
            )
        return json.loads(answer), body.links.get("next", {}).get("url")


def _file(item: dict[str, Any]) -> RemoteFile:
    path, size, lfs = item["path"], item["size"], item.get("lfs")
    known, form = (lfs["oid"], _SHA256) if lfs else (item["oid"], _GIT_HASH)
    sized = type(size) is int and 0 <= size <= LARGEST and (not lfs or lfs.get("size", size) == size)
    if not isinstance(path, str) or not sized or not isinstance(known, str) or not form.fullmatch(known):
        raise TypeError(f"{path!r} has size {size!r} and hash {known!r}")
    if not lfs:
        return RemoteFile(path, size, git_sha1=known)
    xet = item.get("xetHash")
    return RemoteFile(path, size, sha256=known, xet=xet if isinstance(xet, str) and _SHA256.fullmatch(xet) else None)


def ask(
    question: Callable[[], T],
    what: str,
    policy: RetryPolicy,
    *,
    revision: str,
    otherwise: str = "",
    links: bool = False,
) -> T:
    """Return the answer to a question about `what` ("the dataset ORG/NAME").

    For messages, `revision` is what was asked for and `otherwise` what one can do without the Hub. `links`: the
    question is for a file, whose signed link may be refused for a while. Raises RequestError for what asking again
    cannot change, TransientError when the policy's time is up or nothing answers.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise RequestError(f"{what} is on the Hub, and HF_HUB_OFFLINE is set; unset it{otherwise}")

    def valid() -> T:
        try:
            return question()
        except ValueError as error:  # an answer that is no JSON, or not what was asked for
            raise RetryableError(str(error) or type(error).__name__, invalid=True) from error

    def said(retry: RetryableError) -> str:
        return (str(retry).strip().splitlines() or ["no reason"])[0][:300]

    def final(retry: RetryableError, failures: FailureCounts) -> Exception | None:
        if retry.refused and (not links or failures.refused == BELIEVED):
            return RequestError(_refusal(retry.code, what, said(retry), revision, otherwise))
        problem = ""
        if failures.invalid == INVALID:
            problem = f"the Hub's answer for {what} stays invalid"
        elif failures.silent == UNREACHABLE:
            problem = f"could not reach the Hub for {what}"
        return TransientError(f"{problem}: {said(retry)}; run the same command again{otherwise}") if problem else None

    return retrying(valid, policy, problem=lambda retry: f"the Hub did not give {what}: {said(retry)}", final=final)


def _refusal(code: str, what: str, said: str, revision: str, otherwise: str) -> str:
    """Word a refusal, by the code that the Hub gives it (X-Error-Code)."""
    if code == "GatedRepo":
        return f"{what} is gated: accept its terms on its page with the account whose token you use, and set HF_TOKEN"
    if code == "RevisionNotFound":
        return f"{what} has no revision {revision}; look at its branches, tags and commits"
    if code == "EntryNotFound":
        return f"{what} has no such folder or file at this revision"
    if code == "RepoNotFound":
        return (
            f"the Hub does not know {what}, or hides it from this account: check the name, or set HF_TOKEN{otherwise}"
        )
    return f"the Hub refused {what}: {said}; check the name, and that HF_TOKEN may read it"
