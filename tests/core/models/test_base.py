"""What all models of API objects can do."""

from core.models.base import WireModel


class _Volume(WireModel):
    name: str
    size: int
    note: str = "none"

    @property
    def shown(self) -> str:
        return f"PVC {self.name}"


class _Row(WireModel):
    shown: str
    size: int
    place: int
    color: str = "gray"


def test_a_model_takes_over_what_another_one_has_under_the_names_of_its_fields() -> None:
    row = _Row.like(_Volume(name="a", size=3), size=4, place=1)
    assert row == _Row(shown="PVC a", size=4, place=1, color="gray")
