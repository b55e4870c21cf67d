"""The transfers and copies that a command line names."""

import pytest

from core.snapshot_contract import CopyToCheck, TransferToDelete


def test_transfers_and_copies_are_read_as_they_were_written() -> None:
    transfer, copy = TransferToDelete("app", "night", "u1"), CopyToCheck("db", "s2")
    assert TransferToDelete.parse(str(transfer)) == transfer
    assert CopyToCheck.parse(str(copy)) == copy


@pytest.mark.parametrize("text", ["app/night", "app/night/u/1", "app//u1", ""])
def test_a_text_that_is_no_transfer_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not NAMESPACE/BACKUP/UID"):
        TransferToDelete.parse(text)


@pytest.mark.parametrize("text", ["app", "app/", "/s1", "app/s1/x"])
def test_a_text_that_is_no_copy_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not NAMESPACE/SNAPSHOT"):
        CopyToCheck.parse(text)
