"""What stands behind kopia's words, for the first line of a message.

Knows what kopia, storages and the kernel say. Does not know what was attempted.
Source: kopia 0.23.1, repo/open.go, repo/content, repo/blob; S3 error codes; errno(3).
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["NO_BUCKET", "NO_CONNECTION", "REFUSED", "find_cause"]

REFUSED: Final = "the credentials may not use it"
NO_BUCKET: Final = "the bucket does not exist"
_NO_ANSWER: Final = "the endpoint cannot be reached"
_UNKNOWN_NAME: Final = "the endpoint's name is not known"

_NOT_TRUSTED: Final = "the endpoint's certificate is not trusted"

NO_CONNECTION: Final = frozenset({_NO_ANSWER, _UNKNOWN_NAME, _NOT_TRUSTED})
"""kopia tries again for seconds: whoever asks once more waits as long, and hears the same."""

_CAUSES: Final = (
    ("invalid repository password", "the repository password does not match"),
    ("signature we calculated does not match", "the secret access key is not accepted"),
    ("signaturedoesnotmatch", "the secret access key is not accepted"),
    ("access key id you provided does not exist", "the access key is not known there"),
    ("with the provided access key id", "the access key is not known there"),
    ("access denied", REFUSED),
    ("accessdenied", REFUSED),
    ("security token", "the session token is not accepted"),
    ("bucket does not exist", NO_BUCKET),
    ("nosuchbucket", NO_BUCKET),
    ("bucket doesn't exist", NO_BUCKET),
    ("containernotfound", "the container does not exist"),
    ("no such host", _UNKNOWN_NAME),
    ("connection refused", _NO_ANSWER),
    ("i/o timeout", _NO_ANSWER),
    ("no route to host", _NO_ANSWER),
    ("network is unreachable", _NO_ANSWER),
    ("x509:", _NOT_TRUSTED),
    ("gave http response to https client", "the endpoint does not speak TLS"),
    ("cannot access storage path", "the folder is not there or cannot be read"),
    ("found existing data in storage location", "there is no repository, and the place is not empty"),
    ("invalid format blob", "the repository's format file is damaged"),
    ("message authentication failed", "a file of the repository is damaged"),
    ("invalid checksum", "a file of the repository is damaged"),
    ("blob not found", "a file of the repository is missing"),
    ("no space left on device", "the disk is full"),
    ("disk quota exceeded", "the disk's quota is used up"),
    ("read-only file system", "the file system is read-only"),
    ("input/output error", "the disk has a fault"),
)
"""What kopia says, in lower case, and what that means to the reader of a message."""


def find_cause(lines: Iterable[str]) -> str:
    """Return what `lines` of kopia's mean; empty: nothing that is known here."""
    said = "\n".join(lines).lower()
    return next((meaning for words, meaning in _CAUSES if words in said), "")
