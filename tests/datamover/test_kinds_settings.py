import pytest

from core.contract import MoverVerb
from core.errors import ConfigError
from core.models.transfer_settings import Compression
from datamover.kinds import UploaderSettings, parse_settings

_ALL = {"ParallelFilesUpload": "7", "ParallelFilesDownload": "3", "WriteSparseFiles": "true", "New": "x"}


def test_settings_of_the_direction_are_parsed_and_others_named() -> None:
    backup = ("New (unknown)", "ParallelFilesDownload (not of a backup)", "WriteSparseFiles (not of a backup)")
    restore = ("New (unknown)", "ParallelFilesUpload (not of a restore)")
    assert parse_settings(_ALL, MoverVerb.BACKUP) == UploaderSettings(7, ignored=backup)
    assert parse_settings(_ALL, MoverVerb.RESTORE) == UploaderSettings(
        None, 3, write_sparse_files=True, ignored=restore
    )


_UPLOAD, _DOWNLOAD, _ALGORITHM = "ParallelFilesUpload", "ParallelFilesDownload", "Compression"
_READ_ALL = "ReadAllFiles"


@pytest.mark.parametrize(
    ("verb", "settings", "expected"),
    [
        (MoverVerb.BACKUP, {}, UploaderSettings()),
        (MoverVerb.BACKUP, {_UPLOAD: "0"}, UploaderSettings()),
        (MoverVerb.BACKUP, {_UPLOAD: "+4"}, UploaderSettings(4)),
        (MoverVerb.BACKUP, {_UPLOAD: "-3"}, UploaderSettings(ignored=(f"{_UPLOAD} (negative)",))),
        (MoverVerb.BACKUP, {_DOWNLOAD: "many"}, UploaderSettings(ignored=(f"{_DOWNLOAD} (not of a backup)",))),
        (
            MoverVerb.BACKUP,
            {"WriteSparseFiles": "yes"},
            UploaderSettings(ignored=("WriteSparseFiles (not of a backup)",)),
        ),
        (MoverVerb.BACKUP, {_ALGORITHM: " zstd "}, UploaderSettings(compression=Compression.ZSTD)),
        (MoverVerb.BACKUP, {_ALGORITHM: "none"}, UploaderSettings(compression=Compression.NONE)),
        (MoverVerb.BACKUP, {_ALGORITHM: ""}, UploaderSettings()),
        (MoverVerb.BACKUP, {_READ_ALL: "true"}, UploaderSettings(read_all_files=True)),
        (MoverVerb.RESTORE, {_READ_ALL: "true"}, UploaderSettings(ignored=(f"{_READ_ALL} (not of a restore)",))),
        (MoverVerb.RESTORE, {_ALGORITHM: "zip"}, UploaderSettings(ignored=(f"{_ALGORITHM} (not of a restore)",))),
        (MoverVerb.RESTORE, {}, UploaderSettings()),
        (MoverVerb.RESTORE, {_DOWNLOAD: "+4"}, UploaderSettings(None, 4)),
        (MoverVerb.RESTORE, {_DOWNLOAD: "-3"}, UploaderSettings(ignored=(f"{_DOWNLOAD} (negative)",))),
        (MoverVerb.RESTORE, {_UPLOAD: "many"}, UploaderSettings(ignored=(f"{_UPLOAD} (not of a restore)",))),
    ],
)
def test_what_has_no_effect_is_named_and_fails_nothing(
    verb: MoverVerb, settings: dict[str, str], expected: UploaderSettings
) -> None:
    assert parse_settings(settings, verb) == expected


@pytest.mark.parametrize(
    ("verb", "settings", "message"),
    [
        (MoverVerb.BACKUP, {_UPLOAD: "many"}, f'setting {_UPLOAD}: must be a number of files, such as 4: "many"'),
        (MoverVerb.BACKUP, {_UPLOAD: ""}, f'setting {_UPLOAD}: must be a number of files, such as 4: ""'),
        (MoverVerb.RESTORE, {_DOWNLOAD: "1.5"}, f'setting {_DOWNLOAD}: must be a number of files, such as 4: "1.5"'),
        (
            MoverVerb.BACKUP,
            {_ALGORITHM: "zst"},
            f'setting {_ALGORITHM}: must be one of none, .*: "zst" .did you mean zstd?',
        ),
        (MoverVerb.RESTORE, {"WriteSparseFiles": "yes"}, 'setting WriteSparseFiles: must be true or false: "yes"'),
    ],
)
def test_an_invalid_value_is_rejected_with_its_name(verb: MoverVerb, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(settings, verb)
