"""What a policy leaves out of backups, in words."""

import pytest

from core.models.base import JsonDict
from datamover.kopia.policy import describe_exclusions


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ({}, []),
        ({"files": {"ignore": ["*.tmp", "cache"]}}, ['what its ignore rules name ("*.tmp", "cache")']),
        ({"files": {"ignoreDotFiles": [".kopiaignore", ".no"]}}, ["what files named .kopiaignore or .no list"]),
        (
            {"files": {"maxFileSize": 5, "oneFileSystem": True}},
            ["files larger than 5 bytes", "other file systems that"],
        ),
        ({"errorHandling": {"ignoreDirectoryErrors": True}}, ["what cannot be read"]),
    ],
    ids=["nothing", "rules", "files of rules", "size and file system", "errors"],
)
def test_what_a_policy_leaves_out_is_named(policy: JsonDict, found: list[str]) -> None:
    named = describe_exclusions(policy)
    assert len(named) == len(found)
    assert all(one.startswith(start) for one, start in zip(named, found, strict=True))
