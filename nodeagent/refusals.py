"""What it means when the API server does not want an object of ours.

Knows which refusals heal (quota, a missing ServiceAccount, rights, a webhook that does not
answer) and which never will (validation, admission). Does not know the object.
"""

import re
from typing import Final

from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError, ServerError
from exposer.model import Waiting

__all__ = ["judge_refusal"]

_ADMISSION: Final = re.compile(
    r"admission webhook|denied (?:the )?request|violates PodSecurity|(?:maximum|minimum) \S+ usage"
)
"""Words of an admission check that judged the object itself.

Source: Kubernetes v1.34, pkg/admission (webhooks, ValidatingAdmissionPolicy, PodSecurity,
LimitRanger).
"""

_QUOTA: Final = "exceeded quota"
"""Source: Kubernetes v1.34, the ResourceQuota admission plugin."""


def judge_refusal(error: ForbiddenError | InvalidError | ServerError) -> Waiting:
    """Return what is waited for after `error`.

    Raises:
        ExposeError: the object was judged and refused; trying again changes nothing.
    """
    text = str(error)
    if isinstance(error, ServerError):
        return Waiting("ApiServerError", text, trouble=True)
    if isinstance(error, InvalidError) or _ADMISSION.search(text):
        raise ExposeError(text) from error
    return Waiting("QuotaExceeded" if _QUOTA in text else "Forbidden", text, trouble=True)
