"""The address of a prefix in a bucket."""

from tokenmill.errors import RequestError

EXTRAS = {"s3": "s3", "gs": "gs", "az": "az", "abfs": "az"}
"""The extra of this package that installs the client of each scheme."""


class BucketUnavailable(RequestError):
    """A bucket cannot be used with these credentials and this address; its content may be right."""


class BucketAddress:
    """The parts of s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or abfs://CONTAINER@ACCOUNT/PREFIX."""

    def __init__(self, uri: str) -> None:
        """Split an address (RequestError without a bucket)."""
        scheme, _, rest = uri.partition("://")
        self.scheme = scheme.lower()
        authority, _, prefix = rest.partition("/")
        self.bucket, _, host = authority.partition("@")
        self.account = host.partition(".")[0]
        parts = [part for part in prefix.split("/") if part]
        self.prefix = "/".join(parts)
        self.authority = f"{self.bucket}@{self.account}" if self.account else self.bucket
        if not self.bucket:
            raise RequestError(f"{uri!r} does not name a bucket; write {self.scheme}://BUCKET/PREFIX")
        if ":" in self.bucket or (host and self.scheme != "abfs"):
            raise RequestError(
                f"an address of {self.scheme}:// contains a user or a password; remove it: credentials come from the "
                "environment"
            )
        if not {".", ".."}.isdisjoint(parts) or not prefix.isprintable():
            raise RequestError(f"{uri!r} has a part . or .. or a control character; write the prefix without it")
