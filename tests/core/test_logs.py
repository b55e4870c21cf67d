"""Log lines in both formats."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from core.errors import ConfigError
from core.logs import fields, set_up_logging
from core.redact import Redactor


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up_logging(level, log_format, stream)
    return stream


def test_text_line_has_message_and_fields() -> None:
    stream = _lines("text")
    extra = fields(kind="DataUpload", namespace="velero", name="b1", seconds=1.23456)
    logging.getLogger("nodeagent.app").info("phase moved", extra=extra)
    line = stream.getvalue()
    assert line.startswith("time=20")
    assert line.endswith(
        'level=info msg="phase moved" logger=nodeagent.app kind=DataUpload namespace=velero name=b1 seconds=1.235\n'
    )


def test_json_line_has_message_and_fields() -> None:
    stream = _lines("json")
    logging.getLogger("x").warning("going on", extra=fields(bytes=7, reason="Unschedulable"))
    record = json.loads(stream.getvalue())
    del record["time"]
    assert record == {"level": "warning", "msg": "going on", "logger": "x", "reason": "Unschedulable", "bytes": 7}


def test_fields_are_added_also_the_name_that_logging_rejects() -> None:
    stream = _lines("json")
    logging.getLogger("x").info("moved", extra=fields(kind="DataUpload", name="b1", phase="Accepted"))
    record = json.loads(stream.getvalue())
    assert (record["kind"], record["name"], record["phase"]) == ("DataUpload", "b1", "Accepted")


def test_a_traceback_stays_on_the_line() -> None:
    stream = _lines("text")
    try:
        message = "no such\nvolume"
        raise ValueError(message)  # noqa: TRY301 - a traceback is what this test needs
    except ValueError:
        logging.getLogger("x").exception("ended badly")
    assert stream.getvalue().count("\n") == 1
    assert "traceback=" in stream.getvalue()


def test_other_attributes_of_a_record_are_not_printed() -> None:
    for log_format in ("text", "json"):
        stream = _lines(log_format)
        logging.getLogger("x").info("created", extra={"password": "hunter2"})
        assert "hunter2" not in stream.getvalue()


def test_libraries_that_log_bodies_stay_quiet_at_debug() -> None:
    stream = _lines("text", "debug")
    logging.getLogger("kubernetes_asyncio.client.rest").debug("response body: …")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("level", "log_format"), [("loud", "text"), ("info", "xml")], ids=["level", "format"])
def test_an_unknown_level_or_format_is_rejected(level: str, log_format: str) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        set_up_logging(level, log_format)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_redacted_in_message_fields_and_traceback(log_format: str) -> None:
    stream, redactor = io.StringIO(), Redactor()
    set_up_logging("info", log_format, stream, redactor=redactor)
    redactor.add('known "value"')
    error = ValueError('known "value" and password=hunter2')
    extra = fields(reason="https://user:hunter2@host/")
    logging.getLogger("x").error('known "value", AccountKey=hunter2==;', exc_info=error, extra=extra)
    line = stream.getvalue()
    assert "ValueError: *** and password=***" in line
    assert "https://user:***@host/" in line
    assert "hunter2" not in line
    assert "known" not in line
