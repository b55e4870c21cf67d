"""Which of two documents is active."""

from datetime import timedelta

from core.models.transfers import DataUpload
from nodeagent.config.current import CurrentConfig
from nodeagent.config.parse import ParsedConfig, parse_config
from tests.nodeagent.support.transfers import data_upload


def _document(slots: object) -> ParsedConfig:
    text = '{"loadConcurrency": {"globalConfig": %s}}' % slots  # noqa: UP031 - JSON is full of braces
    return parse_config(text)


def _slots(current: CurrentConfig) -> int:
    return current.config.load_concurrency.global_config


def test_a_valid_edit_is_activated_and_subscribers_are_called() -> None:
    current, calls = CurrentConfig(_document(2)), []
    current.subscribe(lambda: calls.append(_slots(current)))
    assert current.update(_document(3)).changed
    assert calls == [3]
    assert current.valid


def test_a_holder_of_the_configuration_keeps_the_one_it_started_with() -> None:
    current = CurrentConfig(_document(2))
    held = current.config
    current.update(_document(3))
    assert held.load_concurrency.global_config == 2


def test_an_edit_with_an_error_is_rejected_as_a_whole() -> None:
    current = CurrentConfig(_document(2))
    update = current.update(parse_config('{"loadConcurrency": {"globalConfig": "x"}, "priorityClassName": "low"}'))
    assert update.rejected
    assert "loadConcurrency.globalConfig: expected a whole number" in update.reasons[0]
    assert (_slots(current), current.config.priority_class_name) == (2, "")
    assert not current.valid
    assert current.rejected == update.reasons


def test_an_edit_back_to_the_active_document_is_a_change_without_a_call() -> None:
    current, calls = CurrentConfig(_document(2)), []
    current.subscribe(lambda: calls.append(1))
    current.update(_document("[]"))
    assert current.update(_document(2)).changed
    assert current.valid
    assert calls == []


def test_the_same_document_is_no_change() -> None:
    current = CurrentConfig(_document(2))
    assert not current.update(_document(2)).changed


def test_errors_at_start_are_no_edit() -> None:
    current = CurrentConfig(_document('"x"'))
    assert not current.update(_document('"x"')).changed
    assert not current.valid
    assert current.rejected == ()


def test_a_rejection_is_a_change_once() -> None:
    current = CurrentConfig(_document(2))
    assert current.reject(("gone",)).changed
    assert not current.reject(("gone",)).changed
    assert current.reject(("not JSON",)).changed


def test_only_a_transfer_with_an_owner_has_a_deadline_without_configuration() -> None:
    owner = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "b", "uid": "u"}
    uploads = [DataUpload.parse(data_upload(ownerReferences=owners)) for owners in ([owner], [])]
    current = CurrentConfig()
    before = [current.retry_rules(each).deadline for each in uploads]
    current.update(parse_config('{"nodeagent.io": {"retry": {"deadline": "1h"}}}'))
    assert before == [timedelta(hours=4), None]
    assert [current.retry_rules(each).deadline for each in uploads] == [timedelta(hours=1)] * 2
