"""What stands behind kopia's words, for the first line of a message.

Knows what kopia, storages and the kernel say. Does not know what was attempted.
Source: kopia 0.23.1, repo/open.go, repo/content, repo/blob; S3 error codes; errno(3).
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["find_cause"]

_CAUSES: Final = (
    ("invalid repository password", "the repository password does not match"),
    ("signature we calculated does not match", "the secret access key is not accepted"),
    ("signaturedoesnotmatch", "the secret access key is not accepted"),
    ("access key id you provided does not exist", "the access key is not known there"),
    ("with the provided access key id", "the access key is not known there"),
    ("access denied", "the credentials may not use it"),
    ("accessdenied", "the credentials may not use it"),
    ("security token", "the session token is not accepted"),
    ("specified bucket does not exist", "the bucket does not exist"),
    ("no such host", "the endpoint's name is not known"),
    ("connection refused", "the endpoint cannot be reached"),
    ("i/o timeout", "the endpoint cannot be reached"),
    ("no route to host", "the endpoint cannot be reached"),
    ("network is unreachable", "the endpoint cannot be reached"),
    ("x509:", "the endpoint's certificate is not trusted"),
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
