"""What the command line says, parsed: nothing here imports what carries it out.

So a pod loads nothing that serves a terminal, and a terminal nothing that reaches a cluster.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from core.contract import VolumeMode

__all__ = ["LoadOptions", "RepositoryOptions"]


@dataclass(frozen=True)
class LoadOptions:
    """What the pod's command line says; paths are inside the pod."""

    kind_flag: str
    name: str
    volume: Path
    mode: VolumeMode
    resource_timeout: timedelta
    cache_volume: str = ""


@dataclass(frozen=True)
class RepositoryOptions:
    """What the command line says of the repository: a folder's path or `s3://bucket/prefix`."""

    name: str
    password: str = field(repr=False)
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    ca_file: str = ""
    verify_tls: bool = True
