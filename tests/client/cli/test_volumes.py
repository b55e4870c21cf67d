"""`nodeagent volumes`: which volumes are protected, why others are not, and what may not be read."""

import json
from datetime import timedelta

import msgspec
import pytest

from client.permissions import VOLUMES_PERMISSIONS
from nodeagent.coverage.states import Coverage
from tests.client.support.commands import Shell
from tests.client.support.status_scene import StatusScene
from tests.client.support.volumes_scene import a_backup, volumes_scene
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.volume_scene import a_claim
from tests.support.access import access_of, not_permitted
from tests.support.golden import assert_golden, assert_golden_text


@pytest.fixture
def scene() -> StatusScene:
    return volumes_scene()


def test_a_new_user_sees_which_volumes_are_not_protected_and_why(scene: StatusScene, shell: Shell) -> None:
    done = shell.run("volumes")
    assert (done.code, done.err) == (0, "")
    assert not_permitted(map(access_of, scene.kube.requests), VOLUMES_PERMISSIONS, "velero") == []
    assert_golden_text("cli/volumes", done.out)
    assert_golden_text("cli/volumes-wide", shell.run("volumes", "-n", "db", "-o", "wide").out)
    sentence = "35 of 38 volumes protected; 1 never backed up, 1 failing, 1 stale; 2 left out on purpose"
    assert f"Volumes:         {sentence} (nodeagent volumes says why)" in shell.run("status").out
    assert json.loads(shell.run("status", "-o", "json").out)["volumes"]["sentence"] == sentence


def test_programs_get_all_of_it(shell: Shell) -> None:
    text = shell.run("volumes", "-o", "json").out
    found = Coverage.from_json(text)
    counts = {"never-backed-up": 1, "failing": 1, "stale": 1, "protected": 35, "left-out": 2}
    assert {str(state): number for state, number in found.counts.items()} == counts
    assert json.loads(found.to_json()) == json.loads(text)
    assert_golden("cli/volumes-schema", json.loads(json.dumps(msgspec.json.schema(Coverage))))


def test_states_are_chosen_and_the_answer_is_about_all(shell: Shell) -> None:
    lines = shell.run("volumes", "-n", "app", "--state", "stale", "--state", "left-out").out.splitlines()
    assert lines[0] == "17 of 18 volumes protected; 1 stale; 2 left out on purpose"
    assert [line.split()[0] for line in lines[3:]] == ["app/data-03", "app/data-18", "app/data-19"]


def test_without_the_permission_to_list_pvcs_it_says_what_it_cannot_see(scene: StatusScene, shell: Shell) -> None:
    scene.kube.fail_next("GET", "/persistentvolumeclaims", 403, message="forbidden", times=2)
    done = shell.run("volumes")
    assert done.code == 0
    assert done.out.splitlines()[0].endswith("volumes without a backup are not known")
    assert "note: PVCs cannot be read, so volumes that were never backed up are not known: list" in done.err
    assert "note: PVCs cannot be read" in shell.run("status").err


_SOME = "35 of 37 volumes protected; 1 failing, 1 stale; 2 left out on purpose; volumes without a backup are not known"


@pytest.mark.parametrize(
    ("kind", "sentence"), [("DataUpload", "no volumes are known; 2 left out on purpose"), ("PodVolumeBackup", _SOME)]
)
def test_without_the_permission_to_list_backups_no_volume_looks_unprotected(
    scene: StatusScene, shell: Shell, kind: str, sentence: str
) -> None:
    scene.kube.fail_next("GET", f"/{kind.lower()}s", 403, message="forbidden", times=3)
    done = shell.run("volumes")
    assert (done.code, done.out.splitlines()[0]) == (0, sentence)
    assert done.err.startswith(f"note: transfers cannot be read: list {kind} velero: 403 ")
    found = Coverage.from_json(shell.run("volumes", "-o", "json").out)
    assert (found.complete, "never-backed-up" in found.counts) == (False, False)
    assert json.loads(shell.run("status", "-o", "json").out)["volumes"]["complete"] is False
    # All volumes are known without the restores.
    scene.kube.fail_next("GET", "/datadownloads", 403, message="forbidden", times=1)
    status = json.loads(shell.run("status", "-o", "json").out)
    assert (status["unread"], status["volumes"]["complete"]) == (["transfers"], True)


def test_a_backup_that_cannot_be_read_is_named_and_messages_are_harmless(scene: StatusScene, shell: Shell) -> None:
    scene.kube.put(a_backup("app", "data-03", NOON, "Odd"))
    assert shell.run("volumes").err.startswith("note: invalid DataUpload velero/app-data-03-2112: status.phase: ")
    assert json.loads(shell.run("volumes", "-o", "json").out)["notes"][0].startswith("invalid DataUpload velero/app-")
    scene.kube.put(a_backup("app", "data-00", NOON, "Failed", message="bad\x1b[2J\nname\u202e"))
    assert shell.run("volumes", "-o", "wide").out.replace("\n", "").isprintable()


def test_without_the_configuration_it_says_that_annotations_may_count(scene: StatusScene, shell: Shell) -> None:
    annotated = {"nodeagent.io/exclude-from-backup": "cache"}
    scene.kube.put(a_claim("data-03", annotations=annotated))
    scene.kube.fail_next("GET", "/configmaps/node-agent-config", 403, message="forbidden", times=9)
    done = shell.run("volumes", "-n", "app", "-o", "wide")
    assert "note: configuration cannot be read: " in done.err
    (row,) = [line for line in done.out.splitlines() if line.startswith("app/data-03 ")]
    assert "exclude-from-backup counts is not known: the configuration cannot be used" in row


def test_the_volumes_of_one_namespace_need_its_permissions_alone(scene: StatusScene, shell: Shell) -> None:
    assert shell.run("volumes", "-n", "db").out.startswith("7 of 8 volumes protected; 1 failing\n")
    lists = [one.path for one in scene.kube.requests if one.path.startswith("/api/v1/")]
    assert "/api/v1/namespaces/db/persistentvolumeclaims" in lists
    assert "/api/v1/namespaces/db/pods" in lists
    assert not {"/api/v1/persistentvolumeclaims", "/api/v1/pods"} & set(lists)


def test_a_long_table_is_cut_below_what_needs_attention(scene: StatusScene, shell: Shell) -> None:
    for number in range(200):
        scene.kube.put(a_claim(f"more-{number}", "web"))
        scene.kube.put(a_backup("web", f"more-{number}", NOON - timedelta(hours=1 + number % 9)))
    assert shell.run("volumes").out.endswith("\n... 227 more (-o wide lists all)\n")
    assert shell.run("volumes", "-n", "web").out.endswith("\n... 100 more (-o wide lists all)\n")
    assert len(shell.run("volumes", "-o", "wide").out.splitlines()) == 3 + 240
