"""How many bytes had passed at which moment, and the rates that follow.

Does not know what was counted.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["Course"]


@dataclass
class Course:
    """Totals in bytes, each with its moment in seconds, in their order."""

    moments: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def add(self, moment: float, total: int) -> None:
        """Take a sample in."""
        self.moments.append(moment)
        self.totals.append(total)

    @property
    def total(self) -> int:
        """The last total."""
        return self.totals[-1] if self.totals else 0

    def since(self, moment: float) -> "Course":
        """Return the part from a moment on."""
        first = bisect_left(self.moments, moment)
        return Course(self.moments[first:], self.totals[first:])

    def rates(self, seconds: float) -> list[float]:
        """Return the bytes per second of each window of that length that begins with a sample and is within them."""
        found = []
        for moment, total in zip(self.moments, self.totals, strict=True):
            end = moment + seconds
            if end > self.moments[-1]:
                break
            found.append((self._at(end) - total) / seconds)
        return found

    def last_rate(self, seconds: float) -> float:
        """Return the bytes per second of the last window of that length; 0 before it is over."""
        begin = self.moments[-1] - seconds if self.moments else 0.0
        return (self.total - self._at(begin)) / seconds if self.moments and begin >= self.moments[0] else 0.0

    def _at(self, moment: float) -> float:
        """Return the total at a moment within the samples; between two of them it grows evenly."""
        after = bisect_left(self.moments, moment)
        if self.moments[after] == moment:
            return self.totals[after]
        before = after - 1
        share = (moment - self.moments[before]) / (self.moments[after] - self.moments[before])
        return self.totals[before] + share * (self.totals[after] - self.totals[before])
