import logging

import pytest

from core.errors import AgentError
from nodeagent.runtime.workqueue import Faults


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Faults:
    caplog.set_level(logging.DEBUG)
    return Faults(logging.getLogger("faults"))


def test_an_error_is_logged_in_full_once_per_key_and_cause(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    errors = [("a", AgentError("no")), ("a", AgentError("no")), ("b", AgentError("no")), ("a", AgentError("still no"))]
    assert [faults.report(key, "it failed", error) for key, error in errors] == [True, False, True, True]
    assert [(one.levelname, one.exc_info is not None) for one in caplog.records] == [
        ("ERROR", True),
        ("DEBUG", False),
        ("ERROR", True),
        ("ERROR", True),
    ]
    assert caplog.messages[0] == "it failed: no"


def test_an_error_that_returns_after_a_success_is_logged_again(faults: Faults) -> None:
    faults.report("a", "it failed", AgentError("no"))
    faults.forget("a")
    assert faults.report("a", "it failed", AgentError("no"))
