"""The commands as a person runs them in a terminal, one after the other: what they show."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, open_place
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.support.golden import assert_golden_text
from tests.support.terminal import open_terminal, screen_of
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_FILL = """
import os
os.mkdir("/data/etc")
open("/data/etc/app.conf", "w").write("color = blue")
"""
_CHANGING = {
    r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z": "TIME",
    r"\b[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}\b": "MOMENT",
    r"\b[0-9]{14}\b": "STAMP",
    r"\b[0-9a-f]{32}\b": "ID",
    r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b": "UID",
    r"night-[0-9a-f]{8}": "night-HASH",
    r"back-[0-9a-f]{8}": "back-HASH",
    r"\b[0-9]+[smhd]\b": "AGE",
    r"[0-9.]+ [KMG]?i?B/s": "RATE",
    # A Velero server that another test has shown to the leader holds maintenance.
    r"(held|in AGE): \S+( \S+)*": "in AGE",
    r" +": " ",
}
"""What differs from run to run, and what it is replaced by."""


class _Person:
    """Types commands, and keeps what the terminal shows."""

    def __init__(self, bed: Bed, space: str, folder: Path) -> None:
        self.bed, self.space, self.folder = bed, space, folder
        self.shown: list[str] = []

    def enter(self, line: str, *, answer: str = "", code: int = 0) -> None:
        """Run one command, SPACE in it being the namespace, and answer its question."""
        words = line.replace("SPACE", self.space).replace("FOLDER", str(self.folder)).split()
        with open_terminal(words, columns=240, environment=self.bed.env) as terminal:
            if answer:
                terminal.read_until(r"\[y/N\]")
                terminal.answer(answer)
            assert terminal.finish()[0] == code, terminal.text
        text = screen_of(terminal.raw).replace(str(self.folder), "FOLDER").replace(self.space, "SPACE")
        for pattern, name in _CHANGING.items():
            text = re.sub(pattern, name, text)
        self.shown.append(f"$ nodeagent {line}\n{text.rstrip()}\n")


@pytest.fixture
def person(agent: Bed, space: str, tmp_path: Path) -> Iterator[_Person]:
    Volume(agent, space).fill(_FILL)
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield _Person(agent, space, tmp_path)
    kinds = ["cronjobs", "serviceaccounts", "roles", "rolebindings"]
    if found := [name for name in agent.user.names(kinds, "-n", NAMESPACE) if space in name]:
        agent.user.kubectl("delete", *found, "-n", NAMESPACE, "--ignore-not-found", "--wait=false")
    agent.user.kubectl("delete", "namespace", f"{space}-new", "--ignore-not-found", "--wait=false")


def test_what_a_person_sees(person: _Person) -> None:
    place = "--storage-location SPACE"
    person.enter(f"backup create SPACE-night --pvc SPACE/dta {place}", code=1)
    person.enter(f"backup create SPACE-night --pvc SPACE/data {place} --ttl 720h --wait")
    person.enter(f"backup create SPACE-night --pvc SPACE/data {place} --ttl 720h --wait")
    person.enter("backup get SPACE-night -o wide")
    person.enter("backup describe SPACE-night")
    person.enter("backup ls SPACE-night")
    person.enter("backup ls SPACE-night data/etc")
    person.enter("backup cp SPACE-night:data/etc/app.conf FOLDER")
    person.enter("backup cp SPACE-night:data/etc/app.conf FOLDER", code=1)
    assert (person.folder / "app.conf").read_text() == "color = blue"
    person.enter("backup verify SPACE-night")
    person.enter("backup get --from-storage-location SPACE -n SPACE")
    person.enter("repo get SPACE-SPACE-kopia")
    person.enter("repo connect-command SPACE-SPACE-kopia")
    person.enter("restore create SPACE-back --from-backup SPACE-night --namespace-mappings SPACE:SPACE-new --wait")
    person.enter("restore create SPACE-back --from-backup SPACE-night --namespace-mappings SPACE:SPACE-new --wait")
    person.enter("restore get SPACE-back")
    person.enter("restore describe SPACE-back")
    person.enter("restore cancel SPACE-back")
    person.enter("backup delete SPACE-night", answer="n")
    person.enter("backup delete SPACE-night", answer="y")
    person.enter("backup delete SPACE-night", code=1)
    assert_golden_text("cli/all-commands", "\n".join(person.shown))


def test_what_a_person_sees_of_a_schedule(person: _Person) -> None:
    create = "schedule create SPACE --schedule @yearly --pvc SPACE/data --ttl 720h"
    person.enter(f"{create} --storage-location SPAEC", code=1)
    person.enter(f"{create} --storage-location SPACE")
    person.enter(f"{create} --storage-location SPACE --verify")
    person.enter("schedule get SPACE -o wide")
    person.enter("schedule run SPACE --dry-run")
    person.enter("schedule delete SPACE")
    person.enter("schedule delete SPACE", code=1)
    assert_golden_text("cli/all-commands-schedule", "\n".join(person.shown))
