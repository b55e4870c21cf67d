"""Paths on nodes of either system, on whatever system this runs."""

import pytest

from exposer.node_paths import node_path, overlap, parse_node_path


@pytest.mark.parametrize(
    ("path", "node_os", "expected"),
    [
        ("/var/lib/kubelet/pods/", "linux", "/var/lib/kubelet/pods"),
        ("//var/../lib/./kubelet", "linux", "/lib/kubelet"),
        ("/var/a\\b", "linux", "/var/a\\b"),
        ("/var/lib/kubelet/pods/", "windows", r"\var\lib\kubelet\pods"),
        ("C:/var/../lib/./kubelet", "windows", r"C:\lib\kubelet"),
        ("d:\\kubelet\\pods", "windows", r"d:\kubelet\pods"),
    ],
)
def test_a_path_has_the_form_of_its_system(path: str, node_os: str, expected: str) -> None:
    found = parse_node_path(path, node_os=node_os)
    assert str(found) == expected
    assert node_path(expected) == found


@pytest.mark.parametrize(
    ("one", "other", "node_os", "expected"),
    [
        ("/var/lib", "/var/lib/kubelet", "linux", True),
        ("/VAR/lib", "/var/lib/kubelet", "linux", False),
        ("/var/lib/kubelet2", "/var/lib/kubelet", "linux", False),
        ("C:/VAR/lib/kubelet/plugins", "/var/lib/kubelet", "windows", True),
        ("C:\\", "/var/lib/kubelet", "windows", True),
        ("D:\\var", "/var/lib/kubelet", "windows", False),
    ],
)
def test_paths_overlap_if_one_is_in_the_other(one: str, other: str, node_os: str, expected: bool) -> None:
    first, second = (parse_node_path(path, node_os=node_os) for path in (one, other))
    assert (overlap(first, second), overlap(second, first)) == (expected, expected)
