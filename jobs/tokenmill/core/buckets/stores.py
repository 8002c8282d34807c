"""Open a bucket of Amazon S3, Google Cloud Storage or Azure Blob Storage with the credentials of the environment."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.core.buckets.address import BucketAddress, BucketUnavailable
from tokenmill.core.files.credential_files import check_certificates, check_credentials
from tokenmill.core.redaction import register_secret_file

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config, S3Credential

CREDENTIAL_FILES = ("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json")
"""Files in which the providers' libraries search for credentials, in addition to the environment."""
CREDENTIAL_SECONDS = 600
"""Time after which credentials are read again; the providers' libraries renew those that expire."""
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
AZURE_ENDPOINT = "{protocol}://{account}.blob.{suffix}"


def open_store(address: BucketAddress, stall_seconds: float, retry_seconds: float) -> "ObjectStore":
    """Return the client of a bucket.

    It gives up a connection that is silent for `stall_seconds`, and repeats a failed request for `retry_seconds`.

    Raises:
        BucketUnavailable: there are no credentials.
        RequestError: a file of the environment with credentials cannot be used.
        ImportError: a package of the provider is not installed.
    """
    for path in CREDENTIAL_FILES:
        register_secret_file(path)
    check_certificates(*(["AWS_CA_BUNDLE"] if address.scheme == "s3" else []))
    check_credentials(address.scheme)
    options: ClientConfig = {
        "allow_http": True,  # an endpoint with http:// is one that the user named
        "read_timeout": timedelta(seconds=stall_seconds),
        "timeout": timedelta(days=365),  # the limit of a whole body, which may have a terabyte
    }
    if certificates := _certificates("AWS_CA_BUNDLE" if address.scheme == "s3" else ""):
        options["root_certificate"] = certificates
    retries: RetryConfig = {"max_retries": 30, "retry_timeout": timedelta(seconds=retry_seconds)}
    make = {"s3": _open_s3, "gs": _open_google}.get(address.scheme, _open_azure)
    try:
        return make(address, options, retries)
    except (ValueError, KeyError) as error:
        raise BucketUnavailable(
            f"cannot open {address.scheme}://{address.bucket}: {error}; check the credentials in the environment"
        ) from error


def _certificates(variable: str) -> bytes | None:
    """Return the certificates of authorities that the environment names, in addition to those of the system."""
    for name in (variable, "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        path = Path(os.environ.get(name) or "/")
        if path.is_file():
            return path.read_bytes()
    return None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def _open_s3(address: BucketAddress, options: "ClientConfig", retries: "RetryConfig") -> "ObjectStore":
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session
    from obstore.store import S3Store

    session = Session()
    credentials: Callable[[], S3Credential] | None = None
    try:
        endpoint = _find_endpoint(session)
        region = session.get_config_variable("region")
        if not _is_set("AWS_SKIP_SIGNATURE"):
            credentials = _read_aws_credentials(session)
    except BotoCoreError as error:
        raise ValueError(str(error)) from error
    config: S3Config = {"skip_signature": credentials is None, "checksum_algorithm": "SHA256"}
    if endpoint:
        config["endpoint"] = endpoint
    else:
        region = _ask_for_region(address.bucket, region) or region
    config["region"] = region or "us-east-1"
    return S3Store(
        address.bucket, config=config, client_options=options, retry_config=retries, credential_provider=credentials
    )


def _find_endpoint(session: Any) -> str | None:
    """Return the address of S3 that the environment or the configuration file names."""
    from botocore.configprovider import ConfiguredEndpointProvider

    scoped = session.get_scoped_config()
    if str(session.get_config_variable("ignore_configured_endpoint_urls")).lower() == "true":
        return None
    provider = ConfiguredEndpointProvider(full_config=session.full_config, scoped_config=scoped, client_name="s3")
    endpoint: str | None = provider.provide()
    return endpoint


def _ask_for_region(bucket: str, region: str | None) -> str | None:
    """Return the region of a bucket, which S3 tells everybody; None if there is no answer."""
    import requests

    suffix = ".cn" if str(region).startswith("cn-") else ""
    host = f"s3.{region}.amazonaws.com{suffix}" if region else "s3.amazonaws.com"
    try:
        response = requests.head(f"https://{host}/{bucket}", timeout=10)
    except requests.RequestException:
        return None
    return response.headers.get("x-amz-bucket-region")


def _read_aws_credentials(session: Any) -> "Callable[[], S3Credential]":
    credentials = session.get_credentials()
    if credentials is None:
        raise ValueError("there are no AWS credentials (for a public bucket, set AWS_SKIP_SIGNATURE=true)")

    def read() -> "S3Credential":
        current = credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIAL_SECONDS),
        }

    return read


def _open_google(address: BucketAddress, options: "ClientConfig", retries: "RetryConfig") -> "ObjectStore":
    import google.auth.exceptions
    from obstore.auth.google import GoogleCredentialProvider
    from obstore.store import GCSStore

    config: GCSConfig = {}
    provider: GoogleCredentialProvider | None = None
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
    elif not _is_set("GOOGLE_SKIP_SIGNATURE"):
        try:
            credentials, _ = google.auth.default(scopes=[GOOGLE_SCOPE])
        except google.auth.exceptions.GoogleAuthError as error:
            reason = f"{str(error).splitlines()[0]} (for a public bucket, set GOOGLE_SKIP_SIGNATURE=true)"
            raise ValueError(reason) from error
        provider = GoogleCredentialProvider(credentials)
    config["skip_signature"] = provider is None
    return GCSStore(
        address.bucket, config=config, client_options=options, retry_config=retries, credential_provider=provider
    )


def _open_azure(address: BucketAddress, options: "ClientConfig", retries: "RetryConfig") -> "ObjectStore":
    from azure.identity import DefaultAzureCredential
    from obstore.auth.azure import AzureCredentialProvider
    from obstore.store import AzureStore

    settings = _read_connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    account = address.account or settings.get("AccountName") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not account:
        raise ValueError("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_CONNECTION_STRING are not set")
    protocol = settings.get("DefaultEndpointsProtocol", "https")
    suffix = settings.get("EndpointSuffix", "core.windows.net")
    endpoint = settings.get("BlobEndpoint") or AZURE_ENDPOINT.format(protocol=protocol, account=account, suffix=suffix)
    key = settings.get("AccountKey") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    signature = settings.get("SharedAccessSignature") or os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    config: AzureConfig = {"account_name": account, "endpoint": endpoint}
    provider: AzureCredentialProvider | None = None
    if _is_set("AZURE_STORAGE_ANON") or _is_set("AZURE_SKIP_SIGNATURE"):
        config["skip_signature"] = True
    elif key:
        config["account_key"] = key
    elif signature:
        config["sas_key"] = signature.removeprefix("?")
    else:
        provider = AzureCredentialProvider(DefaultAzureCredential())
    return AzureStore(
        address.bucket, config=config, client_options=options, retry_config=retries, credential_provider=provider
    )


def _read_connection_string(text: str) -> dict[str, str]:
    """Return the settings of Azure's connection string, NAME=VALUE;NAME=VALUE (ValueError)."""
    settings = {}
    for part in filter(None, text.strip().split(";")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError("AZURE_STORAGE_CONNECTION_STRING is malformed")
        settings[name.strip()] = value.strip()
    if settings.get("UseDevelopmentStorage", "").lower() == "true":
        raise ValueError("AZURE_STORAGE_CONNECTION_STRING must name the emulator's BlobEndpoint")
    return settings
