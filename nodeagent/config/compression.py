"""The key `nodeagent.io.compression`: by which algorithm backups are compressed."""

from pydantic import Field

from core.models.compression import Compression
from nodeagent.config.selectors import Section

__all__ = ["CompressionKeys"]


class CompressionKeys(Section):
    """The value of `nodeagent.io.compression`."""

    default: Compression = Field(
        default=Compression.NONE,
        description="kopia's algorithm for volumes whose storage class is not in perStorageClass, or that have none",
        examples=["zstd-fastest"],
    )
    per_storage_class: dict[str, Compression] = Field(
        default_factory=dict,
        description="kopia's algorithms, by the storage class of the source volume",
        examples=[{"fast": "zstd"}],
    )
