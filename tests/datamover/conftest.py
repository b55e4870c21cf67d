"""Fixtures: kopia on the PATH, repositories, an S3 server, and a check for leaked tasks and processes."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from datamover.arguments import RepositoryOptions
from datamover.kopia import creation
from datamover.kopia.repository import Repository
from datamover.local.command import LocalMover
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import use_backup_mover, use_plain_mover
from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import children_of
from tests.datamover.support.repositories import opened
from tests.datamover.support.s3proxy import S3Proxy, run_s3_proxy
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.datamover.support.trees import make_tree
from tests.datamover.support.unconfined import record_kopia
from tests.support.tools import tool


@pytest.fixture(autouse=True)
async def _nothing_leaks() -> AsyncIterator[None]:
    """A test that leaves a task or a child process fails."""
    children = {child.pid for child in children_of(os.getpid())}
    tasks = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() - {asyncio.current_task()} <= tasks
    assert {child.pid for child in children_of(os.getpid())} <= children


@pytest.fixture(scope="session")
def kopia_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kopia as its own tests build it, which derives keys by a hash: otherwise that is most of what a call costs."""
    # A file of this name: one that is run by its descriptor has the name of what a link leads to.
    return Path(shutil.copy(tool("kopia", "kopia-testing"), tmp_path_factory.mktemp("kopia") / "kopia"))


@pytest.fixture(autouse=True)
def _kopia_on_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if request.node.get_closest_marker("processes"):
        kopia_program: Path = request.getfixturevalue("kopia_program")
        monkeypatch.setenv("PATH", f"{kopia_program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("VELERO_SCRATCH_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "KOPIA_PASSWORD"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _backup_mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("plain"):
        use_plain_mover(monkeypatch)
    else:
        use_backup_mover(monkeypatch)


@pytest.fixture(autouse=True)
def _no_other_creators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that is created in a bucket is used at once."""
    monkeypatch.setattr(creation, "SETTLE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    """A proxy before the S3 server."""
    with run_s3_proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the command line of each kopia."""
    return record_kopia(tmp_path, monkeypatch)


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    """A pod whose repository exists and is Ready."""
    return MoverPod.ready(_new_repository, tmp_path)


@pytest.fixture
def plain_kopia(pod: MoverPod, kopia_program: Path) -> PlainKopia:
    """kopia by itself, on the pod's repository."""
    kopia = PlainKopia(kopia_program, pod.folder)
    kopia.connect(pod.repository)
    return kopia


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture(scope="session")
def _new_repository(kopia_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty repository; copying one takes less time than creating it."""
    folder = tmp_path_factory.mktemp("template")
    path = folder / "repository"
    path.mkdir()
    PlainKopia(kopia_program, folder).run("repository", "create", "filesystem", f"--path={path}", *IDENTITY)
    return path


@pytest.fixture
def repository(_new_repository: Path, tmp_path: Path) -> Path:
    """The directory of an empty repository with Velero's identity."""
    return Path(shutil.copytree(_new_repository, tmp_path / "repository"))


@pytest.fixture
def kopia(repository: Path, tmp_path: Path, kopia_program: Path) -> PlainKopia:
    """kopia by itself, connected to the repository as Velero is."""
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.connect(repository)
    return kopia


@pytest.fixture
def mover_repository(repository: Path) -> Iterator[Repository]:
    """The repository as a data mover opens it, not yet connected."""
    with opened(FileStorage(repository)) as found:
        yield found


@pytest.fixture
def local_mover(repository: Path) -> LocalMover:
    """The data mover in local mode, on the repository."""
    return build_local_mover(str(repository))


def build_local_mover(name: str, password: str = PASSWORD, stop: StopSignal | None = None) -> LocalMover:
    options = RepositoryOptions(name, password)
    return LocalMover(options, os.environ, limits=ResourceLimits(2), clock=SystemClock(), stop=stop or StopSignal())
