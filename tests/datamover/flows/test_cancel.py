"""A cancel, by the custom resource or by a signal, is heeded within two seconds whatever the mover is at."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.support.fakekube import FakeKube

_SOURCE = "default@default:snapshot-data-upload-download/kopia/app/data"
_UNREADABLE = Path("/proc/sys/net/ipv4/route")
"""A folder whose file `flush` nobody can read: kopia keeps an incomplete snapshot of it."""


@dataclass(frozen=True)
class _Load:
    """A load in its pod; `begun` is there once it is where it is held."""

    pod: MoverPod
    kind: str
    flag: str
    spec: dict[str, str]
    begun: Path

    def put(self, phase: str = "InProgress", **more: bool) -> None:
        self.pod.put_transfer(self.kind, phase, **self.spec, **more)

    def cancel(self) -> None:
        self.put(cancel=True)

    def signal(self) -> None:
        self.pod.stop._take(signal.SIGTERM, None)

    async def ends_canceled(self, volume: Path, *, held: Callable[[], bool], end: Callable[["_Load"], None]) -> None:
        """Run it, end it once `held` is true, and look at how it ended."""
        pod = self.pod
        async with asyncio.TaskGroup() as group:
            running = group.create_task(pod.run(self.flag, volume))
            await pod.wait_for(held)
            assert not running.done()
            end(self)
            async with asyncio.timeout(2):
                await asyncio.shield(running)
        assert running.result() == 14
        assert pod.message.endswith("data path is canceled")


@pytest.fixture
def peer(tmp_path: Path, _new_repository: Path, kopia_program: Path) -> PlainKopia:
    """The peer's side, on the pod's repository."""
    place = tmp_path / "backups" / "kopia" / "app"
    shutil.copytree(_new_repository, place)
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.connect(place)
    return kopia


@pytest.fixture
def pod(tmp_path: Path, peer: PlainKopia) -> MoverPod:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture
def upload(pod: MoverPod, tmp_path: Path) -> _Load:
    return _Load(pod, "DataUpload", "data-upload", {}, tmp_path / "begun")


@pytest.fixture
def download(pod: MoverPod, tree: Path, tmp_path: Path, peer: PlainKopia) -> _Load:
    peer.run("snapshot", "create", str(tree), f"--override-source={_SOURCE}", "--pin=velero-pin")
    (snapshot,) = peer.snapshots()
    return _Load(pod, "DataDownload", "data-download", {"snapshotID": snapshot["id"]}, tmp_path / "begun")


def _hold(load: _Load, program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of a program whose arguments hold `words` begin and never end."""
    real, folder = shutil.which(program), load.begun.with_name("bin")
    folder.mkdir()
    script = f'case " $* " in *" {words} "*) : >{load.begun}; exec sleep 1000;; esac\nexec {real} "$@"\n'
    (folder / program).write_text(f"#!/bin/sh\n{script}")
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


_ENDS = pytest.mark.parametrize("end", [_Load.cancel, _Load.signal], ids=["spec.cancel", "SIGTERM"])


@_ENDS
async def test_while_it_waits_for_its_start(upload: _Load, tree: Path, end: Callable[[_Load], None]) -> None:
    upload.put("Prepared")
    asked = upload.pod.kube.requests
    await upload.ends_canceled(tree, held=lambda: any("watch" in one.query for one in asked), end=end)
    assert upload.pod.events() == []


@_ENDS
async def test_while_it_waits_for_its_repository(upload: _Load, tree: Path, end: Callable[[_Load], None]) -> None:
    upload.pod.put_repository(phase="New")
    upload.put()
    await upload.ends_canceled(tree, held=lambda: "Data-Path-Waiting" in upload.pod.reasons(), end=end)


@_ENDS
@pytest.mark.parametrize("words", ["policy show", "policy set", "snapshot list", "snapshot delete", "snapshot create"])
async def test_in_each_step_of_a_backup(
    upload: _Load, peer: PlainKopia, monkeypatch: pytest.MonkeyPatch, words: str, end: Callable[[_Load], None]
) -> None:
    """`snapshot delete` takes away what an earlier upload left."""
    peer.run("snapshot", "create", str(_UNREADABLE), f"--override-source={_SOURCE}", "--fail-fast", fails=True)
    _hold(upload, "kopia", words, monkeypatch)
    upload.put()
    await upload.ends_canceled(upload.pod.folder / "backups", held=upload.begun.exists, end=end)
    assert all("incomplete" in one for one in peer.snapshots())
    assert upload.pod.reasons()[-2:] == ["Data-Path-Canceled", "Data-Path-Stopped"]


@_ENDS
@pytest.mark.parametrize(
    ("program", "words"), [("kopia", "manifest show"), ("kopia", "restore"), ("sync", "--file-system")]
)
async def test_in_each_step_of_a_restore(
    download: _Load, monkeypatch: pytest.MonkeyPatch, program: str, words: str, end: Callable[[_Load], None]
) -> None:
    _hold(download, program, words, monkeypatch)
    download.put()
    target = download.pod.folder / "target"
    target.mkdir()
    await download.ends_canceled(target, held=download.begun.exists, end=end)
    assert download.pod.reasons()[-2:] == ["Data-Path-Canceled", "Data-Path-Stopped"]
