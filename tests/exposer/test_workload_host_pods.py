"""The kubelet's pods directory as the agent has it mounted: where a volume is, and what a container has left."""

import os
from pathlib import Path

import pytest

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES
from core.errors import ExposeError
from exposer.workload import find_mover_events, find_volume_directory, list_pods, read_termination_message

_ROOT = "/var/lib/kubelet/pods/u-1/volumes"
_CSI = "kubernetes.io~csi"


def _computed(plugin: str = "kubernetes.io~nfs", name: str = "pvc-1") -> str:
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


@pytest.mark.parametrize("others", [(), ("example.com~disk", "other~disk")], ids=["alone", "beside others"])
def test_a_volume_in_the_computed_directory_is_there(host_pods: Path, others: tuple[str, ...]) -> None:
    _mount(host_pods, "kubernetes.io~nfs", *others)
    assert _find(host_pods, _computed()) == _computed()


@pytest.mark.parametrize("computed", ["kubernetes.io~nfs", _CSI])
@pytest.mark.parametrize("actual", ["example.com~disk", _CSI, "kubernetes.io~nfs"])
def test_a_volume_of_another_plugin_is_found(host_pods: Path, computed: str, actual: str) -> None:
    """The plugin that mounted it decides whether its data is in `mount`."""
    _mount(host_pods, actual)
    assert _find(host_pods, _computed(computed)) == _computed(actual)


@pytest.mark.parametrize(
    ("computed", "other"),
    [
        ("kubernetes.io~nfs", "kubernetes.io~empty-dir"),
        (_CSI, "kubernetes.io~configmap"),
        ("kubernetes.io~secret", _CSI),
        ("kubernetes.io~projected", "kubernetes.io~downward-api"),
    ],
)
def test_another_volume_of_the_same_name_is_not_taken_for_it(host_pods: Path, computed: str, other: str) -> None:
    """A PersistentVolume may have the name of a volume of the pod."""
    _mount(host_pods, other)
    with pytest.raises(ExposeError, match=r"is not in the kubelet's directories"):
        _find(host_pods, _computed(computed))


@pytest.mark.parametrize(("computed", "other"), [(_CSI, "kubernetes.io~empty-dir"), ("kubernetes.io~empty-dir", _CSI)])
def test_a_volume_of_an_unknown_plugin_is_found_beside_another_volume_of_its_name(
    host_pods: Path, computed: str, other: str
) -> None:
    _mount(host_pods, "example.com~disk", other)
    assert _find(host_pods, _computed(computed)) == _computed("example.com~disk")


@pytest.mark.parametrize("name", ["volumes", "mount", "pods"])
@pytest.mark.parametrize("computed", ["kubernetes.io~nfs", _CSI])
def test_a_volume_may_have_the_name_of_a_part_of_the_path(host_pods: Path, computed: str, name: str) -> None:
    _mount(host_pods, "example.com~disk", name=name)
    found = _find(host_pods, _computed(computed, name))
    assert found == f"{_ROOT}/example.com~disk/{name}"


@pytest.mark.cause("volume-directory")
def test_a_volume_that_is_in_no_directory_is_rejected_with_those_that_are(host_pods: Path) -> None:
    _mount(host_pods, "example.com~disk", name="pvc-2")
    with pytest.raises(ExposeError) as caught:
        _find(host_pods, _computed())
    assert str(caught.value) == (
        "volume fs of workload pod app/writer is not in the kubelet's directories of the pod: "
        "looked for volumes/*/pvc-1, "
        "found example.com~disk/pvc-2, kubernetes.io~empty-dir/scratch"
    )


def test_a_volume_in_several_directories_is_rejected_with_all_of_them(host_pods: Path) -> None:
    _mount(host_pods, "b~disk", "a~disk")
    with pytest.raises(ExposeError) as caught:
        _find(host_pods, _computed())
    assert str(caught.value) == (
        "volume fs of workload pod app/writer is in several of the kubelet's directories of the pod: "
        "a~disk/pvc-1, b~disk/pvc-1"
    )


def test_many_directories_are_not_all_listed(host_pods: Path) -> None:
    _mount(host_pods, *(f"a~{number:03}" for number in range(300)), name="other")
    with pytest.raises(ExposeError, match=r"found a~000/other, .* and 291 more$"):
        _find(host_pods, _computed())


def test_a_pod_without_directories_is_rejected(host_pods: Path) -> None:
    with pytest.raises(ExposeError, match=r"looked for volumes/\*/pvc-1, found nothing$"):
        _find(host_pods, _computed().replace("u-1", "u-3"))


def test_a_file_among_the_plugins_is_passed_over(host_pods: Path) -> None:
    (host_pods / "u-1" / "volumes" / "file").touch()
    _mount(host_pods, "example.com~disk")
    assert _find(host_pods, _computed()) == _computed("example.com~disk")


def test_a_link_of_a_tenant_in_the_volume_is_never_reached(host_pods: Path) -> None:
    """What is mounted is not opened, so that neither a link in it nor a server that hangs matters."""
    _mount(host_pods, "example.com~disk")
    volume = host_pods / "u-1" / "volumes" / "example.com~disk" / "pvc-1"
    (volume / "pvc-1").symlink_to("/")
    volume.chmod(0)
    assert _find(host_pods, _computed()) == _computed("example.com~disk")
    volume.chmod(0o700)


def test_the_computed_directory_is_used_where_there_is_nothing_to_list(tmp_path: Path) -> None:
    """An agent that runs outside of its pod."""
    assert _find(tmp_path / "absent", _computed()) == _computed()


def test_the_computed_directory_is_used_where_the_agent_may_not_list_it(
    host_pods: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "iterdir", deny)
    assert _find(host_pods, _computed()) == _computed()


def _messages(host_pods: Path) -> Path:
    """Return the directory of the termination messages of the container `mover` of the pod u-1."""
    directory = host_pods / "u-1" / "containers" / "mover"
    directory.mkdir(parents=True)
    return directory


def _read(host_pods: Path) -> str | None:
    return read_termination_message(str(host_pods), "u-1", "mover")


def test_the_termination_message_of_a_container_is_read(host_pods: Path) -> None:
    messages = _messages(host_pods)
    (messages / "00000000").touch()
    (messages / "7f3a90c1").write_text("done")
    assert _read(host_pods) == "done"


def test_no_more_is_read_than_the_kubelet_keeps(host_pods: Path) -> None:
    (_messages(host_pods) / "7f3a90c1").write_bytes(b"\xff" * TERMINATION_MESSAGE_LIMIT_BYTES * 2)
    assert _read(host_pods) == "\ufffd" * TERMINATION_MESSAGE_LIMIT_BYTES


def test_neither_a_link_nor_a_pipe_is_read(host_pods: Path) -> None:
    secret, messages = host_pods / "secret", _messages(host_pods)
    secret.write_text("secret")
    (messages / "link").symlink_to(secret)
    os.mkfifo(messages / "pipe")
    assert not _read(host_pods)


def test_a_container_without_a_directory_has_left_nothing(host_pods: Path) -> None:
    assert not _read(host_pods)
    assert not read_termination_message(str(host_pods / "absent"), "u-1", "mover")


def test_the_events_of_a_mover_are_found(host_pods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mover_events(str(host_pods), "u-1") is None
    _mount(host_pods, "kubernetes.io~empty-dir", name="mover-events")
    found = host_pods / "u-1" / "volumes" / "kubernetes.io~empty-dir" / "mover-events"
    assert find_mover_events(str(host_pods), "u-1") == found
    assert find_mover_events("", "u-1") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert find_mover_events(str(host_pods), "u-1") is None
