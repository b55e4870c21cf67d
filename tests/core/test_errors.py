"""Errors built from responses of the API server."""

import json

import pytest

from core.errors import CanceledError, ConfigError, DataPathError, KopiaError, RepositoryError, ResultError
from core.kube.errors import (
    AlreadyExistsError,
    ApplyConflictError,
    ConflictError,
    FieldConflict,
    ForbiddenError,
    GoneError,
    InvalidError,
    KubeError,
    NotFoundError,
    ServerError,
    ThrottledError,
    UnauthorizedError,
    UnknownPathError,
    build_error,
)


def _status(reason: str, message: str = "because", **more: object) -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": message} | more).encode()


@pytest.mark.parametrize(
    ("status", "reason", "expected", "retry"),
    [
        (400, "BadRequest", InvalidError, False),
        (401, "Unauthorized", UnauthorizedError, True),
        (403, "Forbidden", ForbiddenError, False),
        (404, "NotFound", NotFoundError, False),
        (405, "MethodNotAllowed", KubeError, False),
        (409, "Conflict", ConflictError, True),
        (409, "AlreadyExists", AlreadyExistsError, True),
        (410, "Expired", GoneError, True),
        (422, "Invalid", InvalidError, False),
        (429, "TooManyRequests", ThrottledError, True),
        (500, "InternalError", ServerError, True),
        (503, "ServiceUnavailable", ServerError, True),
    ],
)
def test_error_has_the_class_of_its_status(status: int, reason: str, expected: type[KubeError], retry: bool) -> None:
    error = build_error(status, _status(reason), attempted="patch Pod velero/x")
    assert type(error) is expected
    assert (error.status, error.reason, error.retry) == (status, reason, retry)
    assert str(error) == f"patch Pod velero/x: {status} {reason}: because"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"404 page not found\n", id="of a Go server"),
        pytest.param(b"<html>default backend - 404</html>", id="HTML"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"message":"no route","reason":"NotFound"}', id="JSON of a gateway"),
        pytest.param(b'{"kind":"Status","message":"no cluster","reason":"BadGateway"}', id="another reason"),
    ],
)
def test_a_404_that_is_no_status_says_nothing_about_the_object(body: bytes) -> None:
    error = build_error(404, body, attempted="get Pod velero/x")
    assert (type(error), error.status, error.retry) == (UnknownPathError, 404, True)


def test_rejected_uid_is_a_conflict() -> None:
    details = {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid"}]}
    assert type(build_error(422, _status("Invalid", details=details), attempted="patch")) is ConflictError
    others = {"causes": [{"reason": "FieldValueInvalid", "field": "spec.x"}]}
    assert type(build_error(422, _status("Invalid", details=others), attempted="patch")) is InvalidError


def test_any_body_becomes_an_error_of_limited_length() -> None:
    for body in (b"", b"<html>bad gateway</html>", b"[]", b"null", b'{"message":"m","details":null}'):
        assert str(build_error(502, body, attempted="get Pod a/b")).startswith("get Pod a/b: 502")
    absent: tuple[object, ...] = (None, [], "", {})
    for details in absent:
        body = json.dumps({"code": 5, "message": "no route", "details": details}).encode()
        assert str(build_error(404, body, attempted="get Pod a/b")) == "get Pod a/b: 404: no route"
    assert len(str(build_error(500, b"x" * 10_000, attempted="get"))) < 400


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), (None, None)])
def test_retry_after_is_parsed_where_it_is_in_seconds(header: str | None, seconds: float | None) -> None:
    assert build_error(429, b"", attempted="get", retry_after=header).retry_after_seconds == seconds


def test_errors_of_a_mover_have_distinct_exit_codes() -> None:
    classes = (ConfigError, DataPathError, KopiaError, RepositoryError, ResultError, CanceledError)
    assert len({cls.exit_code for cls in classes} - {0}) == len(classes)


def test_conflicts_of_an_apply_name_field_and_manager() -> None:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "kubectl-edit" using apps/v1 at 2026-11-21T10:00:00Z',
            "field": ".spec.replicas",
        },
        {"reason": "FieldManagerConflict", "message": "another text", "field": ".spec.paused"},
    ]
    body = _status("Conflict", "Apply failed with 2 conflicts", details={"causes": causes})
    error = build_error(409, body, attempted="apply Deployment velero/x")
    assert isinstance(error, ApplyConflictError)
    assert error.conflicts == (
        FieldConflict(".spec.replicas", "kubectl-edit"),
        FieldConflict(".spec.paused", "another text"),
    )
    assert not error.retry
