import pytest

from core.errors import ConfigError
from datamover.kinds import UploaderSettings, parse_settings
from datamover.runtime.redact import Redactor


def test_known_settings_are_parsed_and_unknown_ones_named() -> None:
    settings = parse_settings(
        {"ParallelFilesUpload": "7", "ParallelFilesDownload": "3", "WriteSparseFiles": "true", "New": "x"}
    )
    assert settings == UploaderSettings(7, 3, write_sparse_files=True, unknown=("New",))


def test_absent_and_zero_mean_the_default() -> None:
    assert parse_settings({}) == parse_settings({"ParallelFilesUpload": "0"}) == UploaderSettings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ParallelFilesUpload": "many"}, 'setting ParallelFilesUpload: must be a number of files, such as 4: "many"'),
        ({"ParallelFilesDownload": "-1"}, 'setting ParallelFilesDownload: must be a number of files, such as 4: "-1"'),
        ({"WriteSparseFiles": "yes"}, 'setting WriteSparseFiles: must be true or false: "yes"'),
    ],
    ids=["word", "negative", "boolean"],
)
def test_an_invalid_value_is_rejected_with_its_name(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(settings)


def test_secrets_are_redacted_longest_first() -> None:
    redactor = Redactor(["hunter2", "hunter2-and-more", "x"])
    assert redactor.redact("x hunter2-and-more hunter2") == "x *** ***"
