"""Unfinished multipart uploads: what a killed process leaves in a bucket of S3, invisible and not free of charge.

obstore aborts an upload that fails, but has no request for those of other processes. Google Cloud Storage and Azure
Blob Storage remove the parts of such uploads after a week.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tokenmill.core.buckets.address import BucketAddress
from tokenmill.core.buckets.client import BucketError, BucketRefused

DAY_SECONDS = 86_400.0


class UnfinishedUpload(NamedTuple):
    """An upload that has neither ended nor been aborted."""

    key: str
    id: str
    age_seconds: float
    """Seconds since its start; the clocks of the store and of this machine may differ."""


def list_uploads(address: BucketAddress) -> list[UnfinishedUpload]:
    """Return the unfinished uploads below a prefix; an empty list for other stores than S3.

    Raises:
        BucketError: the request failed; `BucketRefused` if the store refuses it.
    """
    if address.scheme != "s3":
        return []
    uploads = []
    with _open(address) as client:
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=address.bucket, Prefix=f"{address.prefix}/" if address.prefix else ""
        )
        for page in pages:
            for upload in page.get("Uploads", []):
                age = time.time() - upload["Initiated"].timestamp()
                uploads.append(UnfinishedUpload(upload["Key"], upload["UploadId"], age))
    return uploads


def abort_uploads(address: BucketAddress, min_age_seconds: float = DAY_SECONDS) -> int:
    """Abort the unfinished uploads below a prefix that are older, and return their number; errors as `list_uploads`."""
    old = [upload for upload in list_uploads(address) if upload.age_seconds >= min_age_seconds]
    if old:
        with _open(address) as client:
            for upload in old:
                client.abort_multipart_upload(Bucket=address.bucket, Key=upload.key, UploadId=upload.id)
    return len(old)


@contextmanager
def _open(address: BucketAddress) -> Iterator[Any]:
    """Yield a client of botocore, and raise its errors as BucketError."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    try:
        client = Session().create_client("s3", config=Config(s3={"addressing_style": "path"}))
        yield client
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        kind = BucketRefused if status in (401, 403, 404) else BucketError
        raise kind(f"{status} ({error.response.get('Error', {}).get('Code')})") from error
    except (BotoCoreError, ValueError) as error:
        raise BucketError(str(error)) from error
