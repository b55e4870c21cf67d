"""Answers as Go reads them: nulls, text that is not UTF-8, and any depth."""

import pytest

from core.kube.errors import parse_json


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a":null,"b":[{"c":null,"d":1}],"e":"null"}', {"b": [{"d": 1}], "e": "null"}),
        (b'{"a":"\xff\xc3"}', {"a": "\ufffd\ufffd"}),
        (b'{"a":"\\ud800x","b":"\\ud83d\\ude00"}', {"a": "\ufffdx", "b": "\U0001f600"}),
        (b'{"a":"\\uDC00"}', {"a": "\ufffd"}),
        (b'{"a":"\xed\xa0\x80"}', {"a": "\ufffd\ufffd\ufffd"}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b"[]", []),
    ],
    ids=["null", "not UTF-8", "half a pair", "other half", "encoded half", "twice", "list"],
)
def test_json_is_read_as_go_does(body: bytes, value: object) -> None:
    assert parse_json(body) == value


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a":', b"{} x", b'{"a":NaN}', b"-Infinity", b"1" * 5000])
def test_what_is_not_json_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(body)


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("depth", [300, 990, 2000, 100_000])
def test_of_what_is_nested_too_deeply_the_upper_levels_are_read(depth: int, nulls: bool) -> None:
    deep = b'{"a":' * depth + b'"}]{["' + b"}" * depth
    others = b'"ok","\\"}",{"x":[[1]]}' + (b',{"y":null}' if nulls else b"")
    value = parse_json(b'{"items":[' + deep + b"," + others + b"]}")
    assert isinstance(value, dict)
    assert value["items"][1:4] == ["ok", '"}', {"x": [[1]]}]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"]" * 100_000, b'{"a":' * 5000 + b"}" * 4999])
def test_deep_text_that_does_not_end_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(body)
