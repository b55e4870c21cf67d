"""The key `nodeagent.io.bandwidth`: how many bytes per second data movers may exchange with storages."""

from datetime import datetime
from typing import Annotated, Final

from pydantic import AfterValidator, Field, StrictInt

from core.models.transfer_settings import BandwidthLimits
from nodeagent.config.value_types import Section, expected
from nodeagent.config.window_keys import WindowKeys
from nodeagent.config.windows import is_open

__all__ = ["BandwidthBudget", "BandwidthKeys"]

_LEAST: Final = 100_000
"""With less, a request of kopia's would time out before one of its blobs of 20 MB has passed."""


def _check_rate(rate: int) -> int:
    if 0 < rate < _LEAST:
        raise expected(f"at least {_LEAST}, or 0: no limit")
    return rate


_Rate = Annotated[StrictInt, Field(ge=0, le=2**50), AfterValidator(_check_rate)]


class BandwidthBudget(Section):
    """A limit in each direction, as seen from the node; with windows, it holds in these alone."""

    upload_bytes_per_second: _Rate = Field(
        default=0, description="bytes per second that are sent; 0: no limit", examples=[50_000_000]
    )
    download_bytes_per_second: _Rate = Field(
        default=0, description="bytes per second that are received; 0: no limit", examples=[50_000_000]
    )
    windows: tuple[WindowKeys, ...] = Field(
        default=(),
        description="when the limits hold; without one: always",
        examples=[[{"schedule": "0 8 * * 1-5", "timeZone": "Europe/Berlin", "duration": "10h"}]],
    )

    def at(self, moment: datetime) -> BandwidthLimits:
        """Return the limits that hold at `moment`."""
        if self.windows and not is_open([one.to_window() for one in self.windows], moment):
            return BandwidthLimits()
        return BandwidthLimits(
            upload_bytes_per_second=self.upload_bytes_per_second,
            download_bytes_per_second=self.download_bytes_per_second,
        )


class BandwidthKeys(Section):
    """The value of `nodeagent.io.bandwidth`."""

    per_mover: BandwidthBudget = Field(
        default_factory=BandwidthBudget,
        description="limits of each data mover",
        examples=[{"uploadBytesPerSecond": 20_000_000}],
    )
    per_node: BandwidthBudget = Field(
        default_factory=BandwidthBudget,
        description="limits that all data movers of a node share",
        examples=[{"uploadBytesPerSecond": 100_000_000}],
    )
    per_location: dict[str, BandwidthBudget] = Field(
        default_factory=dict,
        description="limits on each node that its data movers share which use a BackupStorageLocation, by its name",
        examples=[{"default": {"downloadBytesPerSecond": 50_000_000}}],
    )
