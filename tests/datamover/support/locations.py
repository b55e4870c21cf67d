"""Storages as a data mover builds them from a BackupStorageLocation, and a clock for what asks services for access."""

from pathlib import Path
from typing import Any

from core.clock import SystemClock
from core.models.storage import BackupStorageLocation
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import CredentialsText, Storage


def location_storage(
    provider: str,
    config: dict[str, str] | None = None,
    text: str = "",
    *,
    environment: dict[str, str] | None = None,
    ca_pem: bytes | None = None,
    mounted: Path = Path("/credentials"),
    **storage: Any,
) -> Storage:
    """Return the storage of the location `default` for `app`; its Secret has the text, empty: it names none."""
    spec = {"provider": provider, "config": config or {}, "objectStorage": {"bucket": "bkt", **storage}}
    location = BackupStorageLocation.parse(
        {
            "apiVersion": "velero.io/v1",
            "kind": "BackupStorageLocation",
            "metadata": {"name": "default", "namespace": "velero"},
            "spec": spec,
        }
    )
    secrets = LocationSecrets(CredentialsText(text, "Secret velero/cloud") if text else None, ca_pem)
    return build_storage(location, "app", secrets=secrets, environment=environment or {}, credentials_directory=mounted)


class QuickClock(SystemClock):
    """A clock that only its pauses move, and they take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
