"""What kopia keeps of an entry of a directory, as a command gets it."""

import msgspec
import pytest

from datamover.kopia.snapshot_files import StoredEntry


@pytest.mark.parametrize(
    ("kept", "described"), [("0644", "0644"), ("4755", "4755"), ("", ""), ("0899", ""), ("-7", ""), ("0" * 8, "")]
)
def test_a_mode_that_is_no_octal_number_is_described_as_none(kept: str, described: str) -> None:
    entry = msgspec.json.decode(f'{{"name":"a","type":"f","mode":"{kept}"}}', type=StoredEntry)
    assert (entry.mode, entry.describe().mode) == (described, described)
