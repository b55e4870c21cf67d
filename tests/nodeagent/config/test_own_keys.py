"""The keys below `nodeagent.io`."""

import json
from datetime import timedelta

import pytest

from core.models.base import JsonDict
from exposer.settings import DEFAULT_EXCLUDED
from nodeagent.config.parse import parse_config
from nodeagent.config.windows import VerificationPlan


def findings(document: JsonDict) -> list[str]:
    parsed = parse_config(json.dumps(document))
    return [*map(str, parsed.errors), *map(str, parsed.notes)]


def test_the_account_of_movers_is_read() -> None:
    parsed = parse_config('{"nodeagent.io": {"moverServiceAccount": "movers"}}')

    assert (parsed.errors, parsed.notes) == ((), ())
    assert parsed.config.own.mover_service_account == "movers"


def test_the_excluded_metadata_is_replaced() -> None:
    parsed = parse_config('{"nodeagent.io": {"excludedMetadata": ["cdi.kubevirt.io/"]}}')

    assert (parsed.errors, parsed.notes) == ((), ())
    assert parsed.config.own.excluded_metadata == ["cdi.kubevirt.io/"]
    assert parse_config("{}").config.own.excluded_metadata == list(DEFAULT_EXCLUDED)


def test_restores_are_tested_only_if_the_key_says_so() -> None:
    def plan(**keys: object) -> VerificationPlan | None:
        return parse_config(json.dumps({"nodeagent.io": {"verification": keys}})).config.own.verification_plan

    day = timedelta(hours=24)
    assert plan(period="24h") == VerificationPlan(day)
    tested = plan(period="24h", restoreTest=True, restoreTestStorageClass="scratch")
    assert tested == VerificationPlan(day, restore_test=True, restore_test_class="scratch")


def test_the_namespaces_with_files_of_rules_are_names() -> None:
    parsed = parse_config('{"nodeagent.io": {"ignoreFilesNamespaces": ["*"]}}')
    (error,) = parsed.errors
    assert str(error).startswith('["nodeagent.io"].ignoreFilesNamespaces[0]: expected a name of lower-case letters')


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (
            [{"patterns": ["!kept"]}],
            'exclude.rules[0].patterns[0]: expected a pattern that kopia takes: pattern "!kept"',
        ),
        ([{"sets": ["tapes"]}], "exclude.rules[0].sets[0]: expected"),
        (
            [{"largestSize": "1Ki"}],
            "exclude.rules[0]: expected valid exclusions: the largest size must be at least 4096",
        ),
        (
            [{"largestSize": "16Ei"}],
            "exclude.rules[0]: expected valid exclusions: the largest size must be at most 9223372036854775807",
        ),
        ([{"patterns": [f"a{number}" for number in range(201)]}], "exclude.rules: expected at most 200 patterns"),
    ],
    ids=["pattern", "set", "size", "too large", "too many"],
)
def test_exclusions_that_kopia_would_not_take_are_refused(rules: list[JsonDict], error: str) -> None:
    (found,) = parse_config(json.dumps({"nodeagent.io": {"exclude": {"rules": rules}}})).errors
    assert str(found).startswith(f'["nodeagent.io"].{error}')


def test_a_shared_volume_is_a_claim_or_a_directory_of_a_server() -> None:
    volumes = [
        {"mountPath": "/backups", "persistentVolumeClaim": "shared"},
        {"mountPath": "/far/away", "nfs": {"server": "10.0.0.1", "path": "/export/backups"}},
    ]

    parsed = parse_config(json.dumps({"nodeagent.io": {"repositoryVolumes": volumes}}))

    assert (parsed.errors, parsed.notes) == ((), ())
    assert [volume.to_wire() for volume in parsed.config.own.repository_volumes] == [
        {"persistentVolumeClaim": {"claimName": "shared"}},
        {"nfs": {"server": "10.0.0.1", "path": "/export/backups"}},
    ]


_CLAIM = {"mountPath": "/backups", "persistentVolumeClaim": "shared"}
_NFS = {"server": "nfs", "path": "/export"}
_EITHER = '["nodeagent.io"].repositoryVolumes[0]: expected either persistentVolumeClaim or nfs, found '


@pytest.mark.parametrize(
    ("volumes", "beginning"),
    [
        ([_CLAIM | {"nfs": _NFS}], _EITHER),
        ([{"mountPath": "/backups"}], _EITHER),
        ([_CLAIM, _CLAIM], '["nodeagent.io"].repositoryVolumes: expected a mountPath that no other'),
        ([_CLAIM | {"mountPath": "backups"}], '["nodeagent.io"].repositoryVolumes[0].mountPath: expected an absolute'),
        ([_CLAIM | {"mountPath": "/a/../b"}], '["nodeagent.io"].repositoryVolumes[0].mountPath: expected an absolute'),
        ([_CLAIM | {"mountPath": "/"}], '["nodeagent.io"].repositoryVolumes[0].mountPath: expected an absolute'),
        ([_CLAIM | {"mountPath": "/scratch/a"}], '["nodeagent.io"].repositoryVolumes[0].mountPath: expected a path'),
        (
            [{"mountPath": "/backups", "nfs": {"server": "a b", "path": "/export"}}],
            '["nodeagent.io"].repositoryVolumes[0].nfs.server: expected a host name',
        ),
        (
            [{"mountPath": "/backups", "nfs": {"server": "nfs"}}],
            '["nodeagent.io"].repositoryVolumes[0].nfs: expected server and path',
        ),
        (
            [{"mountPath": "/backups", "nfs": {"server": "nfs", "path": "export"}}],
            '["nodeagent.io"].repositoryVolumes[0].nfs.path: expected an absolute path',
        ),
    ],
)
def test_a_wrong_shared_volume_is_explained(volumes: list[JsonDict], beginning: str) -> None:
    (finding,) = findings({"nodeagent.io": {"repositoryVolumes": volumes}})
    assert finding.startswith(beginning)


@pytest.mark.parametrize(
    ("document", "finding"),
    [
        (
            {"nodeagent.io": {"moverServiceAccount": "Movers"}},
            (
                '["nodeagent.io"].moverServiceAccount: expected a name of lower-case letters, digits, '
                "'-' and '.', found the string \"Movers\" (did you mean movers?)"
            ),
        ),
        ({"nodeagent.io": "movers"}, '["nodeagent.io"]: expected an object, found the string "movers"'),
        (
            {"nodeagent.io": {"serviceAccount": "movers"}},
            '["nodeagent.io"].serviceAccount: unknown key; ignored (did you mean moverServiceAccount?)',
        ),
        (
            {"moverServiceAccount": "movers"},
            "moverServiceAccount: unknown key; ignored (did you mean nodeagent.io.moverServiceAccount?)",
        ),
        (
            {"nodeagent.io": {"excludedMetadata": [""]}},
            (
                '["nodeagent.io"].excludedMetadata[0]: expected the beginning of a key such as "example.com/" or '
                '"example.com/team", found the string ""'
            ),
        ),
    ],
    ids=["no name", "no object", "unknown", "outside", "no prefix"],
)
def test_a_wrong_key_or_value_is_explained(document: JsonDict, finding: str) -> None:
    assert findings(document) == [finding]
    assert parse_config(json.dumps(document)).config.own.mover_service_account == ""
