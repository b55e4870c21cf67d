"""Settings of transfers: compression, limits, exclusions, and restores into volumes that have data.

`tests/datamover/flows/test_exclusions.py` compares what patterns name with kopia.
"""

import pytest

from core.errors import ConfigError
from core.models.names import LEFT_OUT_ANNOTATION
from core.models.transfer_settings import (
    READY_SETS,
    BandwidthLimits,
    Compression,
    Exclusions,
    InPlace,
    LeftOut,
    check_pattern,
    parse_compression,
    read_patterns,
)
from core.models.transfers import DataDownload, PodVolumeRestore
from tests.support.versions import built, prune


@pytest.mark.parametrize("name", ["lz4", "zstd-best-compression", "ZSTD", ""])
def test_names_that_kopia_deprecated_or_does_not_have_are_rejected(name: str) -> None:
    assert [parse_compression(str(one)) for one in Compression] == list(Compression)
    with pytest.raises(ConfigError, match=f'must be one of none, zstd-fastest, .*: "{name}"'):
        parse_compression(name)


_KEY = "nodeagent.io/bandwidth"


def test_limits_are_written_and_read_unless_they_are_invalid() -> None:
    limits = BandwidthLimits(upload_bytes_per_second=5)
    assert limits.to_json() == '{"uploadBytesPerSecond":5}'
    assert BandwidthLimits.from_annotations({_KEY: limits.to_json()}) == limits
    assert BandwidthLimits.from_annotations({_KEY: "{}"}) == BandwidthLimits()
    for text in ("", "x", '{"uploadBytesPerSecond":-1}', '{"uploadBytesPerSecond":"5"}'):
        assert BandwidthLimits.from_annotations({_KEY: text}) is None
    assert BandwidthLimits.from_annotations({}) is None


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("", "leaves everything out"),
        ("/", "leaves everything out"),
        ("**", "leaves everything out"),
        ("a//b", "has //"),
        ("!kept", "exceptions are not supported"),
        (" a", "spaces at its ends"),
        ("a\n", "spaces at its ends"),
        ("a\x1bb", "control characters"),
        ("a" * 201, "more than 200 characters"),
        ("a[", "without its end"),
        ("a\\", "without its end"),
        ("[[:alpha:]]", "is not supported"),
        ("[]", "is not supported"),
        ("[z-a]", "bad character range"),
    ],
)
def test_a_pattern_that_kopia_takes_otherwise_is_refused(pattern: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_pattern(pattern)
    with pytest.raises(ConfigError, match="invalid exclusions"):
        Exclusions.parse(f'{{"patterns": ["{pattern.encode("unicode_escape").decode()}"]}}')


def test_what_is_in_a_directory_that_is_left_out_is_left_out() -> None:
    exclude = Exclusions(patterns=("/cache/", "*.tmp"))
    assert exclude.excludes_path("cache/deep/file", is_dir=False)
    assert exclude.excludes_path("deep/x.tmp", is_dir=True)
    assert not exclude.excludes_path("deep/cache/file", is_dir=False)
    # The pattern is for directories.
    assert not exclude.excludes_path("cache", is_dir=False)


def test_a_limit_of_size_leaves_no_link_out() -> None:
    with pytest.raises(ConfigError, match="at least 4096 bytes"):
        Exclusions.parse('{"maxBytes": 4095}')
    with pytest.raises(ValueError, match="at most 9223372036854775807 bytes"):
        Exclusions(max_bytes=2**63)
    exclude = Exclusions.parse('{"maxBytes": 4096}')
    assert [exclude.excludes_size(size) for size in (4096, 4097)] == [False, True]


def test_rules_are_put_together_and_the_smaller_size_counts() -> None:
    one, other = Exclusions(patterns=("b", "a"), max_bytes=9000), Exclusions(patterns=("b",), max_bytes=5000)
    both = one | other | Exclusions(one_file_system=True)
    assert both == Exclusions(patterns=("a", "b"), max_bytes=5000, one_file_system=True)
    assert (both.digest, len(both.digest or "")) == ((other | both).digest, 12)
    assert Exclusions.parse(both.to_json()) == both
    assert not Exclusions()
    assert Exclusions().digest is None


def test_lines_of_an_annotation_that_are_no_patterns_have_no_effect() -> None:
    assert read_patterns("\n*.tmp\n  cache/ \n!kept\n@unknown\n@lost+found\n*.tmp") == (
        "*.tmp",
        "cache/",
        "/lost+found/",
    )
    assert {name: read_patterns(f"@{name}") for name in READY_SETS} == READY_SETS
    assert read_patterns("!kept\n" * 399 + "in\nbeyond the 400th") == ("in",)


def test_what_was_left_out_is_read_back() -> None:
    found = LeftOut(rules="12ab")
    for number in range(7):
        found = found.add(f"cache/{number}", None if number == 0 else 10)
    assert LeftOut.from_annotations({LEFT_OUT_ANNOTATION: found.to_json()}) == found
    names = ", ".join(f"cache/{number}" for number in range(5))
    assert found.text == f"left out 6 files with 60 bytes and 1 directories by exclusions (rules 12ab): {names}"
    assert LeftOut.from_annotations({LEFT_OUT_ANNOTATION: "{"}) is None
    assert LeftOut.from_annotations({}) is None


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


def test_what_is_invalid_is_named() -> None:
    with pytest.raises(ConfigError, match='unknown restore type "partly": use none, full or incremental'):
        InPlace.of("partly", {})
    with pytest.raises(ConfigError, match='setting DeleteExtraFiles: must be true or false: "yes"'):
        InPlace.of("full", {"DeleteExtraFiles": "yes"})
