"""Kubernetes quantities, such as `2Gi` or `100m`.

Source: k8s.io/apimachinery pkg/api/resource/quantity.go.
"""

import re
from decimal import Decimal
from typing import Final

__all__ = ["parse_quantity"]

_SUFFIX: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
_FORM: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")


def parse_quantity(text: str | float) -> Decimal:
    """Return the number that `text` names, in the base unit (bytes, cores).

    Raises:
        ValueError: `text` is not a quantity.
    """
    form = _FORM.fullmatch(str(text))
    if form is None:
        message = f"{text!r} is not a quantity such as 500Mi, 2Gi or 100m"
        raise ValueError(message)
    number = Decimal(form[1] + (form[2] or ""))
    return number * _SUFFIX[form[3] or ""]
