"""What kopia keeps of an entry of a directory, as a command gets it."""

import msgspec
import pytest

from datamover.kopia.snapshot_files import StoredEntry


@pytest.mark.parametrize(
    ("kept", "described"),
    [
        ("0644", "0644"),
        ("040000755", "4755"),
        ("020000770", "2770"),
        ("04001777", "1777"),
        ("", ""),
        ("0899", ""),
        ("-7", ""),
        ("0" * 12, ""),
    ],
)
def test_the_mode_is_that_of_a_file_and_none_if_it_is_no_octal_number(kept: str, described: str) -> None:
    entry = msgspec.json.decode(f'{{"name":"a","type":"f","mode":"{kept}"}}', type=StoredEntry)
    assert (entry.mode, entry.describe().mode) == (described, described or None)
