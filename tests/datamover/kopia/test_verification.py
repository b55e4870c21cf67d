"""Which errors of a verification are faults of the data, and which ones say nothing about it."""

import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from core.errors import KopiaError
from core.models.verification import VerifiedSnapshot
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.verification import verify_snapshot

_READ = "error reading object 1: unable to get content data: "


async def _verify(*errors: str) -> VerifiedSnapshot:
    """Verify a snapshot with a kopia that ends with these errors."""
    output = {"stats": {"processedObjectCount": 2}, "errorCount": len(errors), "errorStrings": errors}

    async def run(_attempt: Callable[[], Awaitable[KopiaAnswer]]) -> KopiaAnswer:
        return KopiaAnswer("verify", 1, json.dumps(output).encode())

    repository = SimpleNamespace(description="repository", run=run, call_guarded=run)
    snapshot = Snapshot("s1", "/data", "", "k1", 0, 200)
    return await verify_snapshot(cast("Repository", repository), snapshot, 100.0)


@pytest.mark.parametrize(
    "error",
    [
        "The provided token has expired.",
        "Request has expired",
        "RESPONSE 403: ERROR CODE: AuthenticationFailed",
        "oauth2: cannot fetch token: 400 Bad Request",
        "403 Forbidden",
        "open /cache/a: too many open files",
        "fork: cannot allocate memory",
        "context canceled",
        "InvalidObjectState: The operation is not valid for the object's storage class",
        "User: eve is not authorized to perform: kms:Decrypt on the resource associated with this ciphertext",
        "cannot decrypt with a key that is disabled, in bucket checksum-decompress",
        "an unknown error",
    ],
)
async def test_an_error_that_is_not_of_the_content_is_no_failed_verification(error: str) -> None:
    with pytest.raises(KopiaError):
        await _verify(_READ + error)


@pytest.mark.parametrize(
    "error",
    [
        "invalid checksum at p1 offset 0 length 5/5",
        "unable to decrypt content: wrong",
        "error decompressing: bad block",
        "decompression error: corrupt input",
        "ciphertext too short: 0",
        "failed to get blob with ID p1: invalid length",
        'invalid (offset=32,length=679) for blob "q1" of size 0',
        "unable to parse directory object: unexpected end of JSON input",
        "The requested range is not satisfiable",
        "invalid blob offset or length",
        "content not found",
        "content 1234 not found: object not found",
        "object 1 is backed by missing blob p1",
    ],
)
async def test_an_error_of_the_content_is_a_failed_verification_beside_others(error: str) -> None:
    found = await _verify(_READ + "context canceled", _READ + error)
    assert (found.outcome, found.faults) == ("failed", [_READ + error])
