"""The keys of a window in the configuration: when something may start, or when a limit holds."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, StrictStr

from nodeagent.config.value_types import Duration, Section, expected
from nodeagent.config.windows import Window, parse_schedule, parse_time_zone

__all__ = ["ScheduleText", "TimeZoneName", "WindowKeys"]


def _checked_by(parse: Callable[[str], object], what: str) -> AfterValidator:
    """Return the validator of a string that `parse` accepts."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as e:
            raise expected(f"{what} ({e})") from e
        return text

    return AfterValidator(check)


ScheduleText = Annotated[StrictStr, _checked_by(parse_schedule, 'a schedule of a CronJob such as "0 22 * * *"')]
TimeZoneName = Annotated[StrictStr, _checked_by(parse_time_zone, 'a time zone such as "Europe/Berlin"')]


class WindowKeys(Section):
    """One of `windows`."""

    schedule: ScheduleText = Field(description="when the window opens, as in a CronJob", examples=["0 22 * * *"])
    time_zone: TimeZoneName = Field(default="UTC", description="IANA time zone of schedule", examples=["Europe/Berlin"])
    duration: Duration = Field(description="how long it is open", examples=["8h"])

    def to_window(self) -> Window:
        """Return it for decisions."""
        return Window(parse_schedule(self.schedule), parse_time_zone(self.time_zone), self.duration)
