"""No secret is readable: arguments, logs, messages, Events, remaining files."""

from pathlib import Path

import pytest

from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.commandlines import record_kopia
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the command line of each kopia."""
    return record_kopia(tmp_path, monkeypatch)


async def _run_everything(pod: MoverPod, tree: Path) -> str:
    """Initialize, back up, restore, fail, and return all messages and Events."""
    assert await pod.init() == 0
    reported = [pod.message]
    pod.put_repository(phase="Ready")
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0
    reported.append(pod.message)
    pod.put_transfer("DataDownload", snapshotID=pod.result["snapshotID"])
    assert await pod.run("data-download", pod.folder / "target") == 0
    pod.put_secret("velero-repo-credentials", "repository-password", "quite another one")
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 12
    return "".join([*reported, pod.message, str(pod.events())])


async def test_no_secret_is_in_arguments_logs_messages_or_remaining_files(
    s3: S3Server, tree: Path, tmp_path: Path, record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    pod = MoverPod(FakeKube(), tmp_path)
    cloud = {"name": "cloud", "key": "key"}
    pod.put_location({"s3Url": s3.url, "region": "us-east-1"}, bucket=s3.make_bucket("secrets"), credential=cloud)
    pod.put_secret("cloud", "key", s3.credentials_file)
    pod.put_repository()
    reported = await _run_everything(pod, tree)
    lines = record.read_text()
    left = [path.read_bytes() for path in tmp_path.glob("datamover-*/**/*") if path.is_file()]
    assert BACKUP_VERB in lines
    assert left
    for secret in (PASSWORD, "quite another one", s3.secret_key):
        assert secret not in f"{lines}{reported}{caplog.text}"
        assert not any(secret.encode() in content for content in left)
