"""The bandwidth that the data mover of one transfer may use, as the annotation `nodeagent.io/bandwidth` has it.

The owning agent writes it when the data path may start, and again whenever it changes. A mover that finds none then
has no limits for its whole life.
"""

from collections.abc import Mapping
from typing import Annotated, Self

from msgspec import Meta

from core.models.base import WireModel
from core.models.names import BANDWIDTH_ANNOTATION

__all__ = ["BandwidthLimits"]

_BytesPerSecond = Annotated[int, Meta(ge=0, le=2**53)]


class BandwidthLimits(WireModel, omit_defaults=True):
    """Bytes per second in each direction, as seen from the node; 0: no limit."""

    upload_bytes_per_second: _BytesPerSecond = 0
    download_bytes_per_second: _BytesPerSecond = 0

    @classmethod
    def of(cls, annotations: Mapping[str, str]) -> Self | None:
        """Return the limits in the annotations of a transfer; None where theirs is absent or invalid."""
        return cls.read_annotation(annotations, BANDWIDTH_ANNOTATION)
