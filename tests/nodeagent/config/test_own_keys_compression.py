"""The key `nodeagent.io.compression`."""

import json

import pytest

from core.models.base import JsonDict
from core.models.transfer_settings import Compression
from nodeagent.config.parse import parse_config


def test_compression_is_read() -> None:
    document = {"nodeagent.io": {"compression": {"default": "none", "perStorageClass": {"fast": "zstd"}}}}

    parsed = parse_config(json.dumps(document))

    assert (parsed.errors, parsed.notes) == ((), ())
    found = parsed.config.own.compression
    assert (found.default, found.per_storage_class) == (Compression.NONE, {"fast": Compression.ZSTD})


@pytest.mark.parametrize(
    ("compression", "path"),
    [
        ({"default": "zst"}, "default"),
        ({"perStorageClass": {"fast": "zst"}}, "perStorageClass.fast"),
    ],
)
def test_an_unknown_algorithm_is_rejected_with_the_one_that_may_be_meant(compression: JsonDict, path: str) -> None:
    (found,) = parse_config(json.dumps({"nodeagent.io": {"compression": compression}})).errors

    assert str(found).startswith(f"[\"nodeagent.io\"].compression.{path}: expected 'none', 'zstd-fastest', ")
    assert str(found).endswith('found the string "zst" (did you mean zstd?)')


@pytest.mark.parametrize("deprecated", ["lz4", "zstd-best-compression"])
def test_an_algorithm_that_kopia_deprecated_is_rejected(deprecated: str) -> None:
    (found,) = parse_config(json.dumps({"nodeagent.io": {"compression": {"default": deprecated}}})).errors

    assert f'found the string "{deprecated}"' in str(found)
