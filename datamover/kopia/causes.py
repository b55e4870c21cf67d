"""The causes behind kopia's errors, for the first line of a message, and which of them may pass.

Source: kopia 0.23.1, repo/open.go, repo/content, repo/blob; minio-go 7.2.0, retry.go, s3-error.go and utils.go
(ToObjectInfo); MinIO, cmd/api-errors.go; Ceph, rgw_common.cc; Go 1.26, net and net/http; Azure Storage and Google Cloud
Storage, error codes; errno(3).
"""

import re
from collections.abc import Iterable
from typing import Final

from core.contract import MaintenanceCause
from core.text import some_of

ACCESS_DENIED: Final = "the credentials have no access"
NO_BUCKET: Final = "the bucket does not exist"
CACHE_FULL: Final = "the volume of kopia's cache is full"
WRONG_PASSWORD: Final = "the repository password does not match"  # noqa: S105 - no password
NOT_TRUSTED: Final = "the endpoint's certificate is not trusted"
_BAD_FORMAT: Final = "the repository's format file is damaged"
_BAD_FILE: Final = "a repository file is damaged"
_OTHER_FORMAT: Final = "the repository has a format that this version of kopia does not support"
_NO_FILE: Final = "a repository file is missing"
_REFUSED: Final = "the storage does not accept the credentials"
_UNREACHABLE: Final = "the endpoint cannot be reached"
_UNKNOWN_HOST: Final = "the endpoint's host name cannot be resolved"
_BROKEN: Final = "the endpoint closed the connection"
_UNAVAILABLE: Final = "the storage is unavailable"
_BUSY: Final = "the storage is busy"

_SKEWED: Final = "the node's clock differs too much from the storage's"
"""Source: S3 error code RequestTimeTooSkewed (15 minutes); Azure, Shared Key authorization, x-ms-date (15 minutes)."""

_OUTAGES: Final = frozenset({_UNREACHABLE, _UNKNOWN_HOST, _BROKEN, _UNAVAILABLE, _BUSY})
"""Causes that may pass by themselves."""

DAMAGED: Final = frozenset({_BAD_FORMAT, _BAD_FILE, _NO_FILE})
"""Causes that are faults of what the storage has: it answers, and the credentials and the password are right."""

_OF_CONTENT: Final = (
    r"checksum mismatch|unable to decrypt|error decrypting|ciphertext too short"
    r"|error decompressing|decompression (reset )?error|invalid compression header|unexpected chunk length"
    r"|invalid slice offset|invalid blob offset|invalid length|invalid \(offset=\d+,length=\d+\)"
    r"|(invalid|requested) ?range|\b(content|object)( \S+)? not found"
    r"|unable to parse directory object|invalid directory stream|invalid indirect object|malformed (object|content) id"
)
"""What kopia and storages say of data that is there and wrong, or is not there; bare words may be part of a name.
Source: kopia 0.23.1, repo/blob (storage.go, filesystem), repo/content, repo/compression, repo/encryption, repo/format
(blobcfg_blob.go; another password fails before it), repo/object, internal/cache, snapshot/snapshotfs; S3 error
codes."""

_CAUSES: Final = (
    ("invalid repository password", WRONG_PASSWORD),
    ("signature we calculated does not match|signaturedoesnotmatch", "the secret access key is not accepted"),
    ("access key id you provided does not exist|with the provided access key id", "the access key does not exist"),
    ("difference between the request time and|requesttimetooskewed|request date header too old", _SKEWED),
    ("access ?denied|is not authorized to perform", ACCESS_DENIED),
    ("security token included in the request is invalid", "the access key or its session token is not accepted"),
    ("security token", "the session token is not accepted"),
    ("bucket (does not|doesn't) exist|nosuchbucket", NO_BUCKET),
    ("containernotfound", "the container does not exist"),
    (r"the region .* is wrong|addressed using the specified endpoint", "the bucket is in another region"),
    ("last-modified time format is invalid", "the endpoint does not speak S3"),
    ("minimum free (drive|disk) threshold", "the storage is full"),
    ("x509:", NOT_TRUSTED),
    ("gave http response to https client", "the endpoint does not speak TLS"),
    ("cannot access storage path", "the directory does not exist or cannot be read"),
    ("found existing data in storage location", "there is no repository, and the storage is not empty"),
    ("invalid format blob", _BAD_FORMAT),
    ("can't handle repositories created|kopia does not support feature|index version .* not supported", _OTHER_FORMAT),
    ("unsupported key derivation algorithm|unknown (hash function|encryption algorithm)", _OTHER_FORMAT),
    ("message authentication failed|invalid checksum", _BAD_FILE),
    ("(?<!statobject: )blob not found|backed by missing blob", _NO_FILE),
    (r"/kopia-cache/.*(no space left on device|disk quota exceeded)", CACHE_FULL),
    ("no space left on device", "the disk is full"),
    ("disk quota exceeded", "the disk quota is exceeded"),
    ("read-only file system", "the file system is read-only"),
    ("input/output error", "disk I/O error"),
    ("(?m)<volume>.*: permission denied$", "permission denied"),
    ("(?m)<volume>.*: operation not permitted$", "operation not permitted"),
    ("(?m)<volume>.*: file name too long$", "file name too long"),
    ("no such host|server misbehaving", _UNKNOWN_HOST),
    ("connection refused|no route to host|(network|host) is (unreachable|down)", _UNREACHABLE),
    ("i/o timeout|connection timed out|tls handshake timeout|deadline exceeded|awaiting response", _UNREACHABLE),
    ('connection reset by peer|broken pipe|": eof|unexpected eof|closed idle connection', _BROKEN),
    ("closed by foreign host|use of closed network connection|connection broken|connection lost|goaway", _BROKEN),
    ("reduce your request rate|slow ?down|too ?many ?requests|throttl|server ?busy|rate[ _]?limit", _BUSY),
    ("stream error: stream id", _BROKEN),
    ("internal ?error|internal server error|bad gateway|gateway time-?out", _UNAVAILABLE),
    ("(response|error)( code:?)? 5(0[0234]|2[0-7])", _UNAVAILABLE),
    ("(service|temporarily|currently) ?unavailable|not initialized yet|please try again|try again later", _UNAVAILABLE),
    ("service is unable to handle|temporary failure of the server|no available server", _UNAVAILABLE),
    ("no healthy upstream|upstream (connect|request)", _UNAVAILABLE),
    ("request ?time-?out|not read from or written to within the timeout", _BROKEN),
    (r"(?s)<html(?!.*<(title|h1)>(error )?[34]\d\d)", _UNAVAILABLE),
    ("provided token has expired|expiredtoken|request has expired", "the session token or the request has expired"),
    ("authenticationfailed|server failed to authenticate|cannot fetch token|403 forbidden", _REFUSED),
    ("invalidobjectstate|not valid for the object's storage class", "the storage has archived the object"),
    # Google's say "rate limit" beside it, if that passes.
    ("quota ?exceeded", "the storage's quota is exceeded"),
    ("too many open files", "too many files are open"),
    ("cannot allocate memory", "there is no memory left"),
    (_OF_CONTENT, _BAD_FILE),
    # kopia looks for what it has written, and shows that error alone; why it was not written may be in another line.
    # Source: repo/blob/s3/s3_storage.go (PutBlob).
    ("statobject: blob not found", "the storage has not accepted a file"),
)
"""A regular expression for kopia's error in lower case, and the cause as messages name it. Quoted texts are empty in
it, and a path in the volume is `<volume>`: a file may have any name."""

_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_IN_VOLUME: Final = r"(?m)%s(/.*?)?(?=: |$)"
"""Go's errors name the path before the cause. Source: Go 1.26, io/fs.PathError."""

_SKEW: Final = re.compile(r"clock skew detected: .*\bskew: (?P<skew>[^)]+)\)")
_OWNER: Final = re.compile(r"maintenance must be run by designated user: (?P<owner>.*)")
_MISSING_PACK: Final = re.compile(r'"packID":"(?P<pack>[^"]+)"')
_MISSING_BLOB: Final = re.compile(r"failed to get blob with ID (?P<blob>[^\s:]+): BLOB not found")
"""Source: kopia 0.23.1, repo/maintenance/maintenance_run.go, repo/content/verify.go, internal/cache."""

_SHOWN_BLOBS: Final = 3

_INDEX_BLOBS: Final = re.compile(r"found too many index blobs \((\d+)\)")
"""Source: kopia 0.23.1, loadPackIndexesLocked in repo/content/committed_read_manager.go."""


def find_cause(lines: Iterable[str], volume: str | None = None) -> str | None:
    """Return the cause that `lines` of kopia's output show, or None; `volume` is the path that it walks."""
    text = _QUOTED.sub('""', "\n".join(lines).lower())
    if volume:
        text = re.sub(_IN_VOLUME % re.escape(volume.lower()), "<volume>", text)
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, text)), None)


def find_outage(lines: Iterable[str], volume: str | None = None) -> str | None:
    """Return the cause that `lines` of kopia's output show if it may pass by itself, or None."""
    cause = find_cause(lines, volume)
    return cause if cause in _OUTAGES else None


def count_index_blobs(lines: Iterable[str]) -> int:
    """Return the number of index blobs if kopia's output says that there are too many, else 0."""
    found = _INDEX_BLOBS.search("\n".join(lines).lower())
    return int(found[1]) if found else 0


def find_maintenance_cause(lines: Iterable[str]) -> str | None:
    """Return the cause that `lines` of kopia's output show for a failed maintenance, or None."""
    text = "\n".join(lines)
    if found := _SKEW.search(text):
        return f"{MaintenanceCause.CLOCK_SKEW}: the clocks of node and storage differ by {found['skew']}"
    if found := _OWNER.search(text):
        return f"{MaintenanceCause.NOT_OWNER}: maintenance belongs to {found['owner']}"
    # Each once, in the order of kopia's output.
    if missing := list(dict.fromkeys([*_MISSING_PACK.findall(text), *_MISSING_BLOB.findall(text)])):
        return f"{MaintenanceCause.BLOB_NOT_FOUND}: {some_of(missing, _SHOWN_BLOBS)}"
    cause = find_cause(text.splitlines())
    return f"{cause}: {text.splitlines()[-1]}" if cause else None
