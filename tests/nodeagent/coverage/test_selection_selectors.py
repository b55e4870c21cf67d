"""Label selectors as text, and names with wildcards."""

import pytest

from nodeagent.coverage.selection import includes, parse_selector

LABELS = {"tier": "web", "env": "prod", "empty": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("tier=web", True),
        ("tier==web,env=prod", True),
        ("tier=db", False),
        ("tier!=db", True),
        ("other!=x", True),
        ("tier!=web", False),
        ("tier in (web, db)", True),
        ("tier in (db),env=prod", False),
        ("tier notin (web)", False),
        ("other notin (web)", True),
        ("tier", True),
        ("other", False),
        ("!other", True),
        ("! tier", False),
        ("empty=", True),
        ("env=prod , tier in (web)", True),
    ],
)
def test_a_label_selector(text: str, expected: bool) -> None:
    assert parse_selector(text).matches(LABELS) is expected


@pytest.mark.parametrize("text", ["=web", "tier=web env=prod", "tier in web", "tier in (web", "a,,b", "!", "(x)"])
def test_text_that_is_no_label_selector(text: str) -> None:
    with pytest.raises(ValueError, match="not a label selector"):
        parse_selector(text)


@pytest.mark.parametrize(
    ("included", "excluded", "name", "expected"),
    [
        # Velero, pkg/util/collections/includes_excludes_test.go, TestShouldInclude.
        ([], [], "foo", True),
        (["*"], [], "foo", True),
        (["foo", "bar", "baz"], [], "foo", True),
        (["foo", "baz"], [], "bar", False),
        (["*"], ["foo"], "foo", False),
        (["*"], ["foo"], "bar", True),
        (["foo"], ["foo"], "foo", False),
        (["*.bar"], [], "foo.bar", True),
        (["*.bar"], [], "bar.foo", False),
        (["*"], ["*.bar"], "foo.bar", False),
        (["*"], ["*.bar"], "bar.foo", True),
        # pkg/util/wildcard/expand_test.go.
        (["ns-[0-9]"], [], "ns-7", True),
        (["ns-[0-9]"], [], "ns-x", False),
        (["test-?"], [], "test-1", True),
        (["test-?"], [], "test-12", False),
        (["kube-*"], ["kube-system"], "kube-system", False),
    ],
)
def test_included_and_excluded_names(included: list[str], excluded: list[str], name: str, expected: bool) -> None:
    assert includes(name, included, excluded) is expected
