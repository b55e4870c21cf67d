"""What a backup keeps of a PVC beside its data, so that a restore can make the PVC as it was.

It is in the annotation `nodeagent.io/claim` of a transfer, and in the tag of the same name of its snapshot. Any writer
to the bucket chooses what a tag says, so it is checked like any input.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

from msgspec import field
from msgspec.structs import replace

from core.errors import ContractError
from core.models.base import WireModel
from core.models.names import CLAIM_ANNOTATION, OBJECT_NAME
from core.models.units import parse_quantity

__all__ = ["SavedClaim"]

_MODES: Final = frozenset({"Filesystem", "Block"})

_LIMIT_BYTES: Final = 16 * 1024
"""Of the JSON with labels: a tag is an argument of kopia, and all annotations of an object share 256 KiB."""


class SavedClaim(WireModel, omit_defaults=True):
    """The spec of a PVC, its labels, and how large its volume was.

    `size` is the requested quantity, empty: none was requested. `capacity` is the volume's, which may have been
    larger; empty: not known. `storage_class` of None: the claim named none; empty: one without a provisioner.
    """

    namespace: str
    name: str
    size: str = ""
    capacity: str = ""
    storage_class: str | None = None
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject what no PVC could have; msgspec converts the ValueError to a validation error."""
        named = {"namespace": self.namespace, "name": self.name}
        if self.storage_class:
            named["storageClass"] = self.storage_class
        for key, value in named.items():
            if not OBJECT_NAME.fullmatch(value):
                text = f"{key}: not the name of an object"
                raise ValueError(text)
        for quantity in filter(None, (self.size, self.capacity)):
            parse_quantity(quantity)
        if self.volume_mode not in _MODES:
            text = f"volumeMode: must be one of {', '.join(sorted(_MODES))}"
            raise ValueError(text)

    @classmethod
    def from_claim(cls, claim: Mapping[str, Any]) -> Self:
        """Return what is kept of `claim`, a v1 PersistentVolumeClaim as JSON dict.

        Raises:
            ContractError: it does not match the model; the message names the invalid field.
        """
        meta, spec = claim["metadata"], claim.get("spec") or {}
        requests = (spec.get("resources") or {}).get("requests") or {}
        wire = {
            "namespace": meta.get("namespace"),
            "name": meta.get("name"),
            "size": requests.get("storage"),
            "capacity": ((claim.get("status") or {}).get("capacity") or {}).get("storage"),
            "storageClass": spec.get("storageClassName"),
            "accessModes": spec.get("accessModes"),
            "volumeMode": spec.get("volumeMode"),
            "labels": meta.get("labels"),
        }
        return cls.from_wire(wire)

    @classmethod
    def of(cls, annotations: Mapping[str, str]) -> Self | None:
        """Return the claim in the annotations of a transfer; None where it is absent or invalid."""
        return cls.read_annotation(annotations, CLAIM_ANNOTATION)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the claim in the value of the annotation or of the tag; None where it is invalid."""
        try:
            return cls.from_json(text)
        except ContractError:
            return None

    @property
    def text(self) -> str:
        """The value of the annotation and of the tag; without the labels where they are too long."""
        whole = self.to_json()
        return whole if len(whole.encode()) <= _LIMIT_BYTES else replace(self, labels={}).to_json()
