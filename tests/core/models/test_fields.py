"""Every field of a model of the API is read by the product."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.models import base, storage, transfers
from core.models.base import CustomResource, WireModel

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("core", "exposer", "nodeagent", "client", "datamover")


def _read_attributes() -> set[str]:
    files = [file for package in _PACKAGES for file in (_ROOT / package).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def _models() -> Iterator[type[WireModel]]:
    for module in (base, storage, transfers):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, WireModel) and value.__module__ == module.__name__:
                yield value


@pytest.fixture(scope="module")
def read() -> set[str]:
    """The names of all attributes that the product reads."""
    return _read_attributes()


@pytest.mark.parametrize("model", [m for m in _models() if m not in {WireModel, CustomResource}])
def test_every_field_is_read(model: type[WireModel], read: set[str]) -> None:
    unread = set(model.__struct_fields__) - read
    assert unread == set()
