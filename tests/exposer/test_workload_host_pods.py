"""The kubelet's pods directory as the agent has it mounted: where a volume is, and what a container has left."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES
from core.errors import ExposeError
from exposer.workload import find_mover_events, find_volume_directory, list_pods, read_termination_message

_ROOT = "/var/lib/kubelet/pods/u-1/volumes"
_CSI = "kubernetes.io~csi"
_NFS = "kubernetes.io~nfs"
_DISK = "example.com~disk"


def _computed(plugin: str = _NFS, name: str = "pvc-1") -> str:
    return f"{_ROOT}/{plugin}/{name}" + ("/mount" if plugin == _CSI else "")


@pytest.fixture
def host_pods(tmp_path: Path) -> Path:
    """A directory of the kubelet with the pods u-1 and u-2, and one volume beside those of the tests."""
    for directory in ("u-1/volumes/kubernetes.io~empty-dir/scratch", "u-2/volumes/a~b/pvc-1"):
        (tmp_path / directory).mkdir(parents=True)
    return tmp_path


def _mount(host_pods: Path, *plugins: str, name: str = "pvc-1") -> None:
    for plugin in plugins:
        (host_pods / "u-1" / "volumes" / plugin / name).mkdir(parents=True)


def _find(host_pods: Path, computed: str) -> str:
    return find_volume_directory(str(host_pods), computed, what="volume fs of workload pod app/writer")


def test_the_pods_are_listed(host_pods: Path) -> None:
    assert list_pods(str(host_pods)) == {"u-1", "u-2"}


@pytest.mark.parametrize(
    ("computed", "mounted", "found"),
    [
        (_NFS, (_NFS,), _NFS),
        (_NFS, (_NFS, _DISK, "other~disk"), _NFS),
        # The plugin that mounted it decides whether its data is in `mount`.
        (_NFS, (_DISK,), _DISK),
        (_NFS, (_CSI,), _CSI),
        (_CSI, (_DISK,), _DISK),
        (_CSI, (_CSI,), _CSI),
        (_CSI, (_NFS,), _NFS),
        (_CSI, (_DISK, "kubernetes.io~empty-dir"), _DISK),
        ("kubernetes.io~empty-dir", (_DISK, _CSI), _DISK),
        # A PersistentVolume may have the name of a volume of the pod.
        (_NFS, ("kubernetes.io~empty-dir",), None),
        (_CSI, ("kubernetes.io~configmap",), None),
        ("kubernetes.io~secret", (_CSI,), None),
        ("kubernetes.io~projected", ("kubernetes.io~downward-api",), None),
    ],
)
def test_a_volume_is_found_in_the_directory_of_any_plugin_and_no_other_volume_of_its_name_is(
    host_pods: Path, computed: str, mounted: tuple[str, ...], found: str | None
) -> None:
    _mount(host_pods, *mounted)
    if found:
        assert _find(host_pods, _computed(computed)) == _computed(found)
    else:
        with pytest.raises(ExposeError, match=r"is not in the kubelet's directories"):
            _find(host_pods, _computed(computed))


@pytest.mark.parametrize("name", ["volumes", "mount", "pods"])
@pytest.mark.parametrize("computed", [_NFS, _CSI])
def test_a_volume_may_have_the_name_of_a_part_of_the_path(host_pods: Path, computed: str, name: str) -> None:
    _mount(host_pods, _DISK, name=name)
    assert _find(host_pods, _computed(computed, name)) == f"{_ROOT}/{_DISK}/{name}"


@pytest.mark.cause("volume-directory")
def test_a_volume_that_is_in_no_directory_is_rejected_with_those_that_are(host_pods: Path) -> None:
    _mount(host_pods, _DISK, name="pvc-2")
    with pytest.raises(ExposeError) as caught:
        _find(host_pods, _computed())
    assert str(caught.value) == (
        "volume fs of workload pod app/writer is not in the kubelet's directories of the pod: "
        "looked for volumes/*/pvc-1, "
        "found example.com~disk/pvc-2, kubernetes.io~empty-dir/scratch"
    )


@pytest.mark.parametrize(
    ("mounted", "name", "pod", "text"),
    [
        (
            ("b~disk", "a~disk"),
            "pvc-1",
            "u-1",
            r"is in several of the kubelet's directories of the pod: a~disk/pvc-1, b~disk/pvc-1",
        ),
        ([f"a~{number:03}" for number in range(300)], "other", "u-1", r"found a~000/other, .* and 291 more"),
        ((), "", "u-3", r"looked for volumes/\*/pvc-1, found nothing"),
    ],
    ids=["several", "many others", "no directories"],
)
def test_what_was_found_instead_is_named_in_short(
    host_pods: Path, mounted: Iterable[str], name: str, pod: str, text: str
) -> None:
    _mount(host_pods, *mounted, name=name)
    with pytest.raises(ExposeError, match=f"{text}$"):
        _find(host_pods, _computed().replace("u-1", pod))


def test_a_link_of_a_tenant_in_the_volume_is_never_reached_and_a_file_passed_over(host_pods: Path) -> None:
    """What is mounted is not opened, so that neither a link in it nor a server that hangs matters."""
    (host_pods / "u-1" / "volumes" / "file").touch()
    _mount(host_pods, _DISK)
    volume = host_pods / "u-1" / "volumes" / _DISK / "pvc-1"
    (volume / "pvc-1").symlink_to("/")
    volume.chmod(0)
    assert _find(host_pods, _computed()) == _computed(_DISK)
    volume.chmod(0o700)


def test_the_computed_directory_is_used_where_the_agent_cannot_list_it(
    host_pods: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run outside of its pod."""
    assert _find(host_pods / "absent", _computed()) == _computed()

    def deny(path: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "iterdir", deny)
    assert _find(host_pods, _computed()) == _computed()


def test_a_termination_message_is_read_as_far_as_the_kubelet_keeps_it(host_pods: Path) -> None:
    def read() -> str | None:
        return read_termination_message(str(host_pods), "u-1", "mover")

    assert not read()
    assert not read_termination_message(str(host_pods / "absent"), "u-1", "mover")
    messages, secret = host_pods / "u-1" / "containers" / "mover", host_pods / "secret"
    messages.mkdir(parents=True)
    secret.write_text("secret")
    (messages / "link").symlink_to(secret)
    os.mkfifo(messages / "pipe")
    (messages / "00000000").touch()
    assert not read(), "neither a link nor a pipe is read"
    (messages / "7f3a90c1").write_text("done")
    assert read() == "done"
    (messages / "7f3a90c1").write_bytes(b"\xff" * TERMINATION_MESSAGE_LIMIT_BYTES * 2)
    assert read() == "\ufffd" * TERMINATION_MESSAGE_LIMIT_BYTES


def test_the_events_of_a_mover_are_found(host_pods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mover_events(str(host_pods), "u-1") is None
    _mount(host_pods, "kubernetes.io~empty-dir", name="mover-events")
    found = host_pods / "u-1" / "volumes" / "kubernetes.io~empty-dir" / "mover-events"
    assert find_mover_events(str(host_pods), "u-1") == found
    assert find_mover_events("", "u-1") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert find_mover_events(str(host_pods), "u-1") is None
