import pytest

from datamover.kopia.causes import count_index_blobs, find_cause, find_outage

_OPEN = (
    'open repository: unable to open repository: cannot open storage: error retrieving storage config from bucket "b": '
)
_DIRECTORY = "the directory does not exist or cannot be read"
_GET = 'Get "https://s3.example.com/b/.storageconfig": '


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (_GET + "dial tcp 10.0.0.1:443: connect: connection refused", "the endpoint cannot be reached"),
        (_GET + "dial tcp 10.0.0.1:443: i/o timeout", "the endpoint cannot be reached"),
        (_GET + "dial tcp 10.0.0.1:443: connect: no route to host", "the endpoint cannot be reached"),
        (_GET + "net/http: TLS handshake timeout", "the endpoint cannot be reached"),
        (_GET + "dial tcp: lookup s3.example.com: no such host", "the endpoint's host name cannot be resolved"),
        (
            _GET + "dial tcp: lookup s3.example.com on 10.0.0.2:53: server misbehaving",
            "the endpoint's host name cannot be resolved",
        ),
        (
            _GET + "read tcp 10.0.0.3:4->10.0.0.1:443: read: connection reset by peer",
            "the endpoint closed the connection",
        ),
        (_GET + "EOF", "the endpoint closed the connection"),
        ("unexpected EOF", "the endpoint closed the connection"),
        ("Please reduce your request rate.", "the storage is busy"),
        ("Error response code TooManyRequests.", "the storage is busy"),
        ("429 Too Many Requests", "the storage is busy"),
        ("RESPONSE 503: 503 The server is busy.\nERROR CODE: ServerBusy", "the storage is busy"),
        ("503 Service Unavailable", "the storage is unavailable"),
        ("<html><h1>502 Bad Gateway</h1></html>", "the storage is unavailable"),
        ("504 Gateway Timeout", "the storage is unavailable"),
        ("Server not initialized yet, please try again.", "the storage is unavailable"),
        ("We encountered an internal error, please try again.", "the storage is unavailable"),
        ("unexpected GCS error: googleapi: Error 503: Backend Error, backendError", "the storage is unavailable"),
    ],
)
def test_what_may_pass_is_an_outage(error: str, cause: str) -> None:
    assert find_outage([_OPEN + error]) == find_cause([_OPEN + error]) == cause


@pytest.mark.parametrize(
    "error",
    [
        _OPEN + "Access Denied",
        _OPEN + "User: arn:aws:iam::1:user/u is not authorized to perform: sts:AssumeRole on resource: arn:aws:iam::2",
        _OPEN + "The security token included in the request is invalid.",
        _OPEN + "The request signature we calculated does not match the signature you provided.",
        _OPEN + "The Access Key Id you provided does not exist in our records.",
        _OPEN + "The specified bucket does not exist",
        _OPEN + _GET + "tls: failed to verify certificate: x509: certificate signed by unknown authority",
        _OPEN + _GET + "http: server gave HTTP response to HTTPS client",
        _OPEN + "The difference between the request time and the current time is too large.",
        "open repository: unable to open repository: invalid repository password",
        "open repository: invalid format blob: unexpected EOF",
        "error reading blob: message authentication failed",
        "read file a: input/output error",
    ],
)
def test_what_does_not_pass_is_no_outage(error: str) -> None:
    assert find_outage([error]) is None


_VOLUME = "/work/Volume.1"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (f"open {_VOLUME}/connection refused: permission denied", "permission denied"),
        (f"open {_VOLUME}/a: connection refused: permission denied", "permission denied"),
        (f"chown {_VOLUME}/please try again: operation not permitted", "operation not permitted"),
        (f"open {_VOLUME}/Internal Error: file name too long", "file name too long"),
        (f"read {_VOLUME}/unexpected EOF: is a directory", None),
        (f"open {_VOLUME}: permission denied", "permission denied"),
        ('! Error when processing "slow down/connection refused": unsupported', None),
        (r'invalid placeholder for "a\"connection refused" contains foreign object.ID', None),
        (f"write {_VOLUME}/kopia-cache/a: no space left on device", "the disk is full"),
    ],
)
def test_the_name_of_a_file_is_no_cause(line: str, cause: str | None) -> None:
    assert find_outage([line], _VOLUME) is None
    assert find_cause([line], _VOLUME) == cause


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (f"unable to open snapshot file for {_VOLUME}/a: {_GET}EOF", "the endpoint closed the connection"),
        (f"unable to open snapshot file for {_VOLUME}/a: Error 503: Backend Error", "the storage is unavailable"),
        ("dial tcp 10.0.0.1:9000: connect: connection refused", "the endpoint cannot be reached"),
        (_OPEN + "Access Denied", "the credentials have no access"),
        ("cannot access storage path: stat /repository: permission denied", _DIRECTORY),
        ("dial tcp 10.0.0.1:9000: connect: permission denied", None),
        (f"open {_VOLUME}2/connection refused: permission denied", "the endpoint cannot be reached"),
    ],
)
def test_what_a_storage_says_keeps_its_cause_beside_a_volume(line: str, cause: str | None) -> None:
    assert find_cause([line], _VOLUME) == find_cause([line]) == cause


def test_a_full_cache_volume_is_distinguished_from_a_full_volume() -> None:
    full = "error downloading indexes: write {}/tmp.1: no space left on device"
    assert find_cause([full.format("/cache/kopia-cache/indexes")]) == "the volume of kopia's cache is full"
    assert find_cause([full.format("/volume")]) == "the disk is full"


def test_the_number_of_index_blobs_is_found_in_kopias_warning() -> None:
    warning = ["Found too many index blobs (2001), this may result in degraded performance.", "", "Please ensure…"]
    assert count_index_blobs(warning) == 2001
    assert count_index_blobs(["something else"]) == 0


@pytest.mark.parametrize(
    "error",
    [
        "The difference between the request time and the current time is too large.",
        "The difference between the request time and the server's time is too large.",
        "RESPONSE 403: 403 Server failed to authenticate the request.\nRequest date header too old: 'Sat, 21 Nov 2026'",
    ],
    ids=["S3", "MinIO", "Azure"],
)
def test_a_rejected_clock_is_named_and_no_outage(error: str) -> None:
    assert find_cause([_OPEN + error]) == "the node's clock differs too much from the storage's"
    assert find_outage([_OPEN + error]) is None
