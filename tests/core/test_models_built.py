"""Models are built when they are used, or all at once."""

from core.models.base import WireModel, build_models

__all__: list[str] = []


def test_all_models_below_a_root_are_built_at_once() -> None:
    class Root(WireModel):
        pass

    class Leaf(Root):
        number: int

    class LeafOfLeaf(Leaf):
        other: Leaf

    assert not LeafOfLeaf.__pydantic_complete__
    build_models(Root)
    assert Leaf.__pydantic_complete__
    assert LeafOfLeaf.__pydantic_complete__
