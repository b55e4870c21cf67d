"""What all custom resource models share: parsing, metadata, writing back unharmed.

Fields nobody named here are kept as they came (`extra="allow"`), so an object that a newer
peer wrote loses nothing on its way through us.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic.alias_generators import to_camel

from core.errors import ContractError

__all__ = [
    "CustomResource",
    "JsonDict",
    "ObjectMeta",
    "OwnerReference",
    "StringMap",
    "Timestamp",
    "WireModel",
    "build_models",
    "format_time",
]

JsonDict = dict[str, Any]
"""A JSON object as `json.loads` returns it."""


def format_time(moment: datetime) -> str:
    """Return `moment` as the API server prints a metav1.Time: RFC 3339, UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[datetime, PlainSerializer(format_time, when_used="unless-none")]

# Go writes an absent map as null.
StringMap = Annotated[dict[str, str], BeforeValidator(lambda value: value or {})]


class WireModel(BaseModel):
    """A frozen piece of an API object: camelCase on the wire, unknown fields kept."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        alias_generator=to_camel,
        populate_by_name=True,
        defer_build=True,
    )

    def to_wire(self) -> JsonDict:
        """Return the JSON dict this was parsed from; only fields that were set appear."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def build_models(root: type[WireModel] = WireModel) -> None:
    """Build the validators of all models below `root` that are known by now.

    They are built when they are first used otherwise: a process that will use most of them, and
    is to stay at its size, has that behind it with this.
    """
    for model in root.__subclasses__():
        model.model_rebuild()
        build_models(model)


class OwnerReference(WireModel):
    """One of `metadata.ownerReferences`."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class ObjectMeta(WireModel):
    """`metadata` of an object that the API server has stored."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: list[str] = Field(default_factory=list)
    owner_references: list[OwnerReference] = Field(default_factory=list)


class CustomResource(WireModel):
    """An object of the group velero.io."""

    kind_name: ClassVar[str]

    api_version: str
    kind: str
    metadata: ObjectMeta

    @classmethod
    def parse(cls, raw: JsonDict) -> Self:
        """Return the model of `raw`, an object as the API server delivers it.

        Raises:
            ContractError: `raw` does not have the form of this kind; the message names the
                object and each field that is wrong.
        """
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            meta = raw.get("metadata") or {}
            name = f"{meta.get('namespace', '')}/{meta.get('name', '?')}"
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in e.errors()
            )
            message = f"{cls.kind_name} {name} cannot be read: {faults}"
            raise ContractError(message) from e

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def uid(self) -> str:
        """`metadata.uid`."""
        return self.metadata.uid

    @property
    def deleting(self) -> bool:
        """Whether somebody asked for its deletion."""
        return self.metadata.deletion_timestamp is not None
