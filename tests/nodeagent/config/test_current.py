"""Which of two documents is in force."""

from nodeagent.config.current import CurrentConfig
from nodeagent.config.parse import ParsedConfig, parse_config


def _document(slots: object) -> ParsedConfig:
    text = '{"loadConcurrency": {"globalConfig": %s}}' % slots  # noqa: UP031 - JSON is full of braces
    return parse_config(text)


def _slots(current: CurrentConfig) -> int:
    return current.config.load_concurrency.global_config


def test_a_good_edit_is_in_force_and_told_to_whoever_asked() -> None:
    current, heard = CurrentConfig(_document(2)), []
    current.subscribe(lambda: heard.append(_slots(current)))
    assert current.take(_document(3)).changed
    assert heard == [3]
    assert current.valid


def test_who_holds_the_configuration_keeps_what_it_began_with() -> None:
    current = CurrentConfig(_document(2))
    held = current.config
    current.take(_document(3))
    assert held.load_concurrency.global_config == 2


def test_an_edit_with_a_mistake_is_refused_as_a_whole_and_the_last_good_one_stays() -> None:
    current = CurrentConfig(_document(2))
    verdict = current.take(parse_config('{"loadConcurrency": {"globalConfig": "x"}, "priorityClassName": "low"}'))
    assert verdict.refused
    assert "loadConcurrency.globalConfig: expected a whole number" in verdict.reasons[0]
    assert (_slots(current), current.config.priority_class_name) == (2, "")
    assert not current.valid
    assert current.refused == verdict.reasons


def test_an_edit_back_to_the_good_document_is_told_and_changes_nothing() -> None:
    current, heard = CurrentConfig(_document(2)), []
    current.subscribe(lambda: heard.append(1))
    current.take(_document("[]"))
    assert current.take(_document(2)).changed
    assert current.valid
    assert heard == []


def test_the_same_document_again_is_no_news() -> None:
    current = CurrentConfig(_document(2))
    assert not current.take(_document(2)).changed


def test_the_mistakes_that_the_agent_started_with_are_no_edit() -> None:
    current = CurrentConfig(_document('"x"'))
    assert not current.take(_document('"x"')).changed
    assert not current.valid
    assert current.refused == ()


def test_a_refusal_is_news_once() -> None:
    current = CurrentConfig(_document(2))
    assert current.refuse(("gone",)).changed
    assert not current.refuse(("gone",)).changed
    assert current.refuse(("not JSON",)).changed
