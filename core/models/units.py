"""Units on the wire: Go durations such as `1h30m`, and Kubernetes quantities such as `2Gi`.

Source: Go, time.ParseDuration and time.Duration.String; k8s.io/apimachinery pkg/api/resource/quantity.go.
"""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Final

_LONGEST_TEXT: Final = 128
"""Characters of a duration or quantity: a longer one is invalid, and would cost time to parse."""

_LARGEST_INTEGER: Final = 2**63 - 1
"""Go's int64: the longest duration in nanoseconds, and the largest number in JSON."""

_UNIT_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")


def parse_positive_duration(text: str) -> timedelta:
    """Return a duration that is longer than nothing; raise ValueError if the text is none."""
    try:
        duration = parse_duration(text)
    except ValueError:
        duration = timedelta()
    if duration <= timedelta():
        raise ValueError(f'"{text}" is not allowed: expected a duration such as 30s, 10m or 1h30m')
    return duration


def parse_duration(text: str) -> timedelta:
    """Return a Go duration such as `1h30m` or `10m0s`; raise ValueError if it is none, or longer than Go can hold."""
    sign = -1.0 if text.startswith("-") else 1.0
    rest = text[1:] if text[:1] in {"-", "+"} else text
    if rest == "0":
        return timedelta(0)
    position = 0
    seconds = 0.0
    while position < len(rest) <= _LONGEST_TEXT:
        part = _PART.match(rest, position)
        if part is None:
            break
        seconds += float(part[1]) * _UNIT_SECONDS[part[2]]
        position = part.end()
    if not rest or position < len(rest):
        raise ValueError(f'not a duration such as 30s, 10m or 1h30m: "{text[:_LONGEST_TEXT]}"')
    if seconds * 1e9 > _LARGEST_INTEGER:
        raise ValueError(f'duration longer than 292 years: "{text}"')
    return timedelta(seconds=sign * seconds)


def format_duration(duration: timedelta) -> str:
    """Return `duration` as Go formats it, such as `10m0s` or `1.5s`."""
    total = duration.total_seconds()
    if total < 0:
        return "-" + format_duration(-duration)
    hours, rest = divmod(total, 3600)
    minutes, seconds = divmod(rest, 60)
    text = f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{int(hours)}h{int(minutes)}m{text}"
    return f"{int(minutes)}m{text}" if minutes else text


_SUFFIX: Final = {
    **{letter: Decimal(1000) ** power for power, letter in enumerate(("n", "u", "m", "", *"kMGTPE"), start=-3)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}

_FORM: Final = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i)?)")


def parse_quantity(text: str | float) -> Decimal:
    """Return the value of a quantity in the base unit (bytes, cores); raise ValueError if it is none."""
    written = str(text) if isinstance(text, str) or abs(text) <= _LARGEST_INTEGER else ""
    form = _FORM.fullmatch(written) if len(written) <= _LONGEST_TEXT else None
    if form is None:
        raise ValueError(f'not a quantity such as 500Mi, 2Gi or 100m: "{written[:_LONGEST_TEXT]}"')
    return Decimal(form[1] + (form[2] or "")) * _SUFFIX[form[3] or ""]


_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False", ""), False),
}

_COUNT: Final = re.compile("[0-9]{1,18}")


def parse_boolean(text: str) -> bool:
    """Return whether a text is one of Go's for true; an empty one is false. Raise ValueError if it is neither.

    Source: Go, strconv.ParseBool.
    """
    if (word := text.strip()) not in _BOOLEANS:
        raise ValueError(f'must be true or false: "{text}"')
    return _BOOLEANS[word]


def parse_count(text: str) -> int | None:
    """Return the whole number in `text`, decimal digits without a sign; None where it is none, or 10^18 or more."""
    return int(text) if _COUNT.fullmatch(text) else None
