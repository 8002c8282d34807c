"""The files with certificates, keys and tokens that environment variables name.

The clients of the Hub, of buckets and of receivers read these variables. Some of them ignore a missing file, others
retry, and none of them names the variable. Callers check the variables before they use such a client.
"""

import os
import ssl
import stat
from pathlib import Path

from tokenmill.core.files.tree import describe_file_type
from tokenmill.errors import RequestError

CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a file with certificates of authorities; a directory of certificates is accepted, too."""
CREDENTIALS = {
    "s3": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_CERTIFICATE_PATH"),
    "abfs": ("AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_CERTIFICATE_PATH"),
}
"""Variables that name a file with a key or a token, by the scheme of the address that needs it."""


def check_certificates(*more: str) -> None:
    """Check the files with certificates of authorities, also those of the variables `more`.

    Raises:
        RequestError: a variable names a file that cannot be read or contains no certificate.
    """
    for variable in (*CERTIFICATES, *more):
        if (path := os.environ.get(variable)) and not Path(path).is_dir():
            check_named_file(variable, path)
            try:
                ssl.create_default_context(cafile=path)
            except (ssl.SSLError, OSError) as error:
                raise RequestError(
                    f"{variable} names {path!r}, which contains no valid certificate "
                    f"({getattr(error, 'reason', None) or error.strerror}): it must contain certificates in PEM form; "
                    "correct or unset the variable"
                ) from None


def check_credentials(scheme: str) -> None:
    """Check the files with the key or token for addresses of a scheme (RequestError)."""
    for variable in CREDENTIALS.get(scheme, ()):
        if path := os.environ.get(variable):
            check_named_file(variable, path)


def check_named_file(variable: str, path: str) -> None:
    """Check that a variable names a regular file with content that can be read.

    Raises:
        RequestError: the file is missing, empty, unreadable, or of another kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    else:
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return
        problem = "it is empty" if stat.S_ISREG(status.st_mode) else f"it is {describe_file_type(status.st_mode)}"
    raise RequestError(
        f"{variable} names {path!r}, but this file cannot be used: {problem}; correct or unset the variable, or mount "
        "the file"
    )
