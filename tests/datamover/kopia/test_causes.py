import pytest

from datamover.kopia.causes import count_index_blobs, find_cause, find_outage

_OPEN = (
    'open repository: unable to open repository: cannot open storage: error retrieving storage config from bucket "b": '
)
_UNREACHABLE = "the endpoint cannot be reached"
_UNKNOWN_HOST = "the endpoint's host name cannot be resolved"
_BROKEN = "the endpoint closed the connection"
_BUSY = "the storage is busy"
_UNAVAILABLE = "the storage is unavailable"
_WRONG_KEY = "the secret access key is not accepted"
_DIRECTORY = "the directory does not exist or cannot be read"
_GET = 'Get "https://s3.example.com/b/.storageconfig": '


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (_GET + "dial tcp 10.0.0.1:443: connect: connection refused", _UNREACHABLE),
        (_GET + "dial tcp 10.0.0.1:443: i/o timeout", _UNREACHABLE),
        (_GET + "dial tcp 10.0.0.1:443: connect: no route to host", _UNREACHABLE),
        (_GET + "net/http: TLS handshake timeout", _UNREACHABLE),
        (_GET + "dial tcp: lookup s3.example.com: no such host", _UNKNOWN_HOST),
        (_GET + "dial tcp: lookup s3.example.com on 10.0.0.2:53: server misbehaving", _UNKNOWN_HOST),
        (_GET + "read tcp 10.0.0.3:4->10.0.0.1:443: read: connection reset by peer", _BROKEN),
        (_GET + "EOF", _BROKEN),
        # Source: minio-go 7.2.0, api.go: of each EOF.
        (_GET + "Connection closed by foreign host https://s3.example.com/b/.storageconfig. Retry again.", _BROKEN),
        ("unexpected EOF", _BROKEN),
        # Source: Amazon S3, error responses; Ceph names the code alone.
        ("Your socket connection to the server was not read from or written to within the timeout period.", _BROKEN),
        ("Error response code RequestTimeout.", _BROKEN),
        ("408 Request Timeout", _BROKEN),
        # Source: Go's golang.org/x/net, http2/errors.go.
        ("stream error: stream ID 57; INTERNAL_ERROR; received from peer", _BROKEN),
        ("Please reduce your request rate.", _BUSY),
        ("unable to write session marker: s1: StatObject: BLOB not found\nPutBlob(p1): SlowDown", _BUSY),
        ("Error response code TooManyRequests.", _BUSY),
        ("429 Too Many Requests", _BUSY),
        ("googleapi: Error 429: Quota exceeded for egress bandwidth., rateLimitExceeded", _BUSY),
        ("RESPONSE 503: 503 The server is busy.\nERROR CODE: ServerBusy", _BUSY),
        ("local_rate_limited", _BUSY),
        ("503 Service Unavailable", _UNAVAILABLE),
        ("Service is unable to handle request.", _UNAVAILABLE),
        ("The request has failed due to a temporary failure of the server.", _UNAVAILABLE),
        # What proxies answer instead of a storage: Envoy, Traefik, the router of OpenShift, Cloudflare, Google.
        ("no healthy upstream", _UNAVAILABLE),
        ("upstream connect error or disconnect/reset before headers. reset reason: overflow", _UNAVAILABLE),
        ("upstream request timeout", _UNAVAILABLE),
        ("no available server", _UNAVAILABLE),
        ('<html>\n<head>\n<meta name="viewport" content="width=device-width">\n<style type="text/css">', _UNAVAILABLE),
        ("error code: 522", _UNAVAILABLE),
        ("googleapi: got HTTP response code 502 with body: ", _UNAVAILABLE),
        ("<html><h1>502 Bad Gateway</h1></html>", _UNAVAILABLE),
        ("504 Gateway Timeout", _UNAVAILABLE),
        ("Server not initialized yet, please try again.", _UNAVAILABLE),
        ("We encountered an internal error, please try again.", _UNAVAILABLE),
        ("unexpected GCS error: googleapi: Error 503: Backend Error, backendError", _UNAVAILABLE),
    ],
)
def test_what_may_pass_is_an_outage(error: str, cause: str) -> None:
    assert find_outage([_OPEN + error]) == find_cause([_OPEN + error]) == cause


_REGION = "the bucket is in another region"
_PAGE = "the endpoint does not speak S3"
_FULL = "the storage is full"
_QUOTA = "the storage's quota is exceeded"
_FULL_CACHE = "the volume of kopia's cache is full"
_REFUSED_KEY = "the access key or its session token is not accepted"
_UNTRUSTED = "the endpoint's certificate is not trusted"
_WRONG_PASSWORD = "the repository password does not match"
_DENIED = "the credentials have no access"
_SKEWED = "the node's clock differs too much from the storage's"
_FORMAT = "the repository has a format that this version of kopia does not support"
_NO_MARKER = "async write error: unable to write session marker: s1: StatObject: BLOB not found"
_NO_MANAGER = "error connecting to repository: unable to create format manager: "


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (_OPEN + "Access Denied", _DENIED),
        (_OPEN + "User: arn:aws:iam::1:user/u is not authorized to perform: sts:AssumeRole on resource: a", _DENIED),
        (_OPEN + "The security token included in the request is invalid.", _REFUSED_KEY),
        (_OPEN + "The request signature we calculated does not match the signature you provided.", _WRONG_KEY),
        (_OPEN + "The Access Key Id you provided does not exist in our records.", "the access key does not exist"),
        (_OPEN + "The specified bucket does not exist", "the bucket does not exist"),
        (
            _OPEN + "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'",
            _REGION,
        ),
        (_OPEN + "The bucket you are attempting to access must be addressed using the specified endpoint.", _REGION),
        # A page, such as of MinIO's console.
        (
            _OPEN + "Last-Modified time format is invalid, failed with unable to parse  in any of the input formats",
            _PAGE,
        ),
        (
            "Storage backend has reached its minimum free drive threshold. Please delete a few objects to proceed.",
            _FULL,
        ),
        ("Storage backend has reached its minimum free disk threshold.", _FULL),
        ("Error response code QuotaExceeded.", _QUOTA),
        ("Bucket quota exceeded", _QUOTA),
        (_OPEN + _GET + "tls: failed to verify certificate: x509: certificate signed by unknown authority", _UNTRUSTED),
        (_OPEN + _GET + "http: server gave HTTP response to HTTPS client", "the endpoint does not speak TLS"),
        # S3, MinIO and Azure.
        (_OPEN + "The difference between the request time and the current time is too large.", _SKEWED),
        (_OPEN + "The difference between the request time and the server's time is too large.", _SKEWED),
        (_OPEN + "RESPONSE 403: Server failed to authenticate the request.\nRequest date header too old: x", _SKEWED),
        ("open repository: unable to open repository: invalid repository password", _WRONG_PASSWORD),
        ("open repository: invalid format blob: unexpected EOF", "the repository's format file is damaged"),
        ("error reading blob: message authentication failed", "a repository file is damaged"),
        # Source: kopia 0.23.1, repo/format (blobcfg_blob.go, format_provider.go), repo/hashing, internal/feature.
        (
            _NO_MANAGER + "deserialize blob config: unable to decrypt repository blobcfg blob",
            "a repository file is damaged",
        ),
        (_NO_MANAGER + "can't handle repositories created using version 4 (min supported 1, max supported 3)", _FORMAT),
        (_NO_MANAGER + "Failed to derive format encryption key: unsupported key derivation algorithm: a", _FORMAT),
        (_NO_MANAGER + "unable to create hash: unknown hash function a", _FORMAT),
        ("error: This version of Kopia does not support feature 'a'.", _FORMAT),
        ("<html>\n<head><title>413 Request Entity Too Large</title></head>", None),
        ("<!DOCTYPE html>\n<html lang=en>\n<title>Error 400 (Bad Request)!!1</title>", None),
        ("error writing index blob: StatObject: BLOB not found", "the storage has not accepted a file"),
        (_NO_MARKER, "the storage has not accepted a file"),
        (f"{_NO_MARKER}\nERROR flush error: error writing pack file: p1: Bucket quota exceeded", _QUOTA),
        ("read file a: input/output error", "disk I/O error"),
        ("downloading: write /cache/kopia-cache/indexes/a: no space left on device", _FULL_CACHE),
        ("downloading: write /volume/a: no space left on device", "the disk is full"),
    ],
)
def test_what_does_not_pass_is_no_outage(error: str, cause: str | None) -> None:
    assert find_outage([error]) is None
    assert find_cause([error]) == cause


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
        (f"unable to open snapshot file for {_VOLUME}/a: {_GET}EOF", _BROKEN),
        (f"unable to open snapshot file for {_VOLUME}/a: Error 503: Backend Error", _UNAVAILABLE),
        ("dial tcp 10.0.0.1:9000: connect: connection refused", _UNREACHABLE),
        (_OPEN + "Access Denied", "the credentials have no access"),
        ("cannot access storage path: stat /repository: permission denied", _DIRECTORY),
        ("dial tcp 10.0.0.1:9000: connect: permission denied", None),
        (f"open {_VOLUME}2/connection refused: permission denied", _UNREACHABLE),
    ],
)
def test_what_a_storage_says_keeps_its_cause_beside_a_volume(line: str, cause: str | None) -> None:
    assert find_cause([line], _VOLUME) == find_cause([line]) == cause


def test_the_number_of_index_blobs_is_found_in_kopias_warning() -> None:
    warning = ["Found too many index blobs (2001), this may result in degraded performance.", "", "Please ensure…"]
    assert count_index_blobs(warning) == 2001
    assert count_index_blobs(["something else"]) == 0
