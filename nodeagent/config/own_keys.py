"""The keys of the configuration that Velero does not have, below the key `nodeagent.io`.

They are under one key, so that none clashes with a later one of Velero's. Three older ones of ours are
beside Velero's keys (`nodeagent.config.models`).
"""

from typing import Final

from pydantic import Field

from exposer.tenant_metadata import DEFAULT_EXCLUDED
from nodeagent.config.selectors import Section
from nodeagent.config.value_types import KeyPrefix, ObjectName

__all__ = ["OWN_KEY", "OwnKeys"]

OWN_KEY: Final = "nodeagent.io"


class OwnKeys(Section):
    """The value of `nodeagent.io`."""

    mover_service_account: ObjectName = Field(
        default="",
        description="ServiceAccount of mover pods; empty: the one of --mover-service-account (our own key)",
        examples=["node-agent-mover"],
    )
    excluded_metadata: list[KeyPrefix] = Field(
        default_factory=lambda: list(DEFAULT_EXCLUDED),
        description="how the keys of annotations and labels begin that are not copied from a target PVC or a source "
        "VolumeSnapshot to ours, instead of the default list (our own key)",
        examples=[["cdi.kubevirt.io/"]],
    )
