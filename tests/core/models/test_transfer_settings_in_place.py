"""What custom resources ask for about volumes that have data."""

import pytest

from core.errors import ConfigError
from core.models.transfer_settings import InPlace
from core.models.transfers import DataDownload, PodVolumeRestore
from tests.support.versions import built, prune


@pytest.mark.parametrize(
    ("restore_type", "settings", "expected"),
    [
        ("", {"DeleteExtraFiles": "true"}, None),
        ("None", {}, None),
        ("full", {}, InPlace()),
        ("FULL", {"DeleteExtraFiles": "T"}, InPlace(delete_extra_files=True)),
        ("incremental", {"DeleteExtraFiles": "false"}, InPlace(incremental=True)),
        ("Incremental", {"CompareContent": "1"}, InPlace(incremental=True, compare_content=True)),
    ],
)
def test_type_and_settings_of_a_pods_volume(
    restore_type: str, settings: dict[str, str], expected: InPlace | None
) -> None:
    raw = built("podvolumerestore")
    raw["spec"] |= {"restoreType": restore_type, "uploaderSettings": settings}
    assert PodVolumeRestore.parse(raw).in_place == expected


@pytest.mark.parametrize(
    ("volume", "restore_type", "expected"),
    [
        ("", "incremental", None),
        ("pv-1", "incremental", InPlace(incremental=True)),
        ("pv-1", "full", InPlace()),
        ("pv-1", "", InPlace()),
    ],
)
def test_only_the_name_of_a_volume_makes_a_download_one_in_place(
    volume: str, restore_type: str, expected: InPlace | None
) -> None:
    raw = built("datadownload")
    raw["spec"] |= {"restoreType": restore_type}
    raw["spec"]["targetVolume"]["pv"] = volume
    del raw["spec"]["dataMoverConfig"]
    assert DataDownload.parse(raw).in_place == expected


@pytest.mark.parametrize(
    ("model", "index", "expected"),
    [
        pytest.param(DataDownload, 0, InPlace(incremental=True, delete_extra_files=True), id="existing PVC"),
        pytest.param(DataDownload, 1, None, id="new PVC"),
        pytest.param(DataDownload, 2, InPlace(incremental=True), id="velero-block"),
        pytest.param(PodVolumeRestore, 0, InPlace(delete_extra_files=True), id="volume of a pod"),
    ],
)
def test_what_the_next_server_asks_for_is_kept_by_its_definitions_and_read(
    model: type[DataDownload | PodVolumeRestore], index: int, expected: InPlace | None
) -> None:
    raw = built(model.kind_name.lower(), index)
    assert prune("main", raw) == raw
    assert model.parse(raw).in_place == expected


@pytest.mark.parametrize(
    ("restore_type", "settings", "message"),
    [
        ("partly", {}, 'unknown restore type "partly": use none, full or incremental'),
        ("full", {"DeleteExtraFiles": "yes"}, 'setting DeleteExtraFiles: must be true or false: "yes"'),
    ],
)
def test_what_is_invalid_is_named(restore_type: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InPlace.of(restore_type, settings)
