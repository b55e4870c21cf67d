"""The causes behind kopia's errors, for the first line of a message.

Knows the error texts of kopia, storages and the kernel.
Source: kopia 0.23.1, repo/open.go, repo/content, repo/blob; S3 error codes; errno(3).
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["ACCESS_DENIED", "NO_BUCKET", "NO_CONNECTION", "find_cause"]

ACCESS_DENIED: Final = "the credentials have no access"
NO_BUCKET: Final = "the bucket does not exist"
_UNREACHABLE: Final = "the endpoint cannot be reached"
_UNKNOWN_HOST: Final = "the endpoint's host name cannot be resolved"

_NOT_TRUSTED: Final = "the endpoint's certificate is not trusted"

NO_CONNECTION: Final = frozenset({_UNREACHABLE, _UNKNOWN_HOST, _NOT_TRUSTED})
"""kopia has retried these for seconds: another attempt would take as long and fail likewise."""

_CAUSES: Final = (
    ("invalid repository password", "the repository password does not match"),
    ("signature we calculated does not match", "the secret access key is not accepted"),
    ("signaturedoesnotmatch", "the secret access key is not accepted"),
    ("access key id you provided does not exist", "the access key does not exist"),
    ("with the provided access key id", "the access key does not exist"),
    ("access denied", ACCESS_DENIED),
    ("accessdenied", ACCESS_DENIED),
    ("security token", "the session token is not accepted"),
    ("bucket does not exist", NO_BUCKET),
    ("nosuchbucket", NO_BUCKET),
    ("bucket doesn't exist", NO_BUCKET),
    ("containernotfound", "the container does not exist"),
    ("no such host", _UNKNOWN_HOST),
    ("connection refused", _UNREACHABLE),
    ("i/o timeout", _UNREACHABLE),
    ("no route to host", _UNREACHABLE),
    ("network is unreachable", _UNREACHABLE),
    ("x509:", _NOT_TRUSTED),
    ("gave http response to https client", "the endpoint does not speak TLS"),
    ("cannot access storage path", "the directory does not exist or cannot be read"),
    ("found existing data in storage location", "there is no repository, and the storage is not empty"),
    ("invalid format blob", "the repository's format file is damaged"),
    ("message authentication failed", "a repository file is damaged"),
    ("invalid checksum", "a repository file is damaged"),
    ("blob not found", "a repository file is missing"),
    ("no space left on device", "the disk is full"),
    ("disk quota exceeded", "the disk quota is exceeded"),
    ("read-only file system", "the file system is read-only"),
    ("input/output error", "disk I/O error"),
)
"""Part of kopia's error in lower case, and the cause as messages name it."""


def find_cause(lines: Iterable[str]) -> str:
    """Return the cause that `lines` of kopia's output show, or an empty string."""
    text = "\n".join(lines).lower()
    return next((cause for part, cause in _CAUSES if part in text), "")
