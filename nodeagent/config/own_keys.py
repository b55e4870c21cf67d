"""The keys of the configuration that Velero does not have, below the key `nodeagent.io`.

They are under one key, so that none clashes with a later one of Velero's. Three older ones of ours are
beside Velero's keys (`nodeagent.config.models`).
"""

from typing import Final

from pydantic import Field

from nodeagent.config.selectors import Section
from nodeagent.config.value_types import ObjectName

__all__ = ["OWN_KEY", "OwnKeys"]

OWN_KEY: Final = "nodeagent.io"


class OwnKeys(Section):
    """The value of `nodeagent.io`."""

    mover_service_account: ObjectName = Field(
        default="",
        description="ServiceAccount of mover pods; empty: the one of --mover-service-account (our own key)",
        examples=["node-agent-mover"],
    )
