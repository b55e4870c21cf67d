"""An API server that rejects requests as too many (429), because others hold all that it serves at a time."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPSConnection

from core.kube.resources import CONFIG_MAPS, Resource
from tests.cluster.apart import ApartAgent
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.processes import BedError, wait_for

_FLOW_SCHEMAS, _LEVELS = (
    Resource(kind, f"{kind.lower()}s", "flowcontrol.apiserver.k8s.io", namespaced=False)
    for kind in ("FlowSchema", "PriorityLevelConfiguration")
)
_SCHEMA_HEADER = "X-Kubernetes-PF-FlowSchema-UID"
_PRECEDENCE = 10
"""Before the schemas of every API server, apart from those for administrators and probes."""

_REJECTIONS = 5
"""In a row, until all that is served at a time is held: one may be due to a short request of the agent."""

_SECONDS = 60


@contextmanager
def throttling(own: ApartAgent) -> Iterator[None]:
    """Let the API server reject the requests of the agent.

    The accounts of its namespace get a priority level of their own without shares, which serves one request at a time:
    one whose body does not come.
    """
    name, user = own.space, own.bed.user
    user.apply(_build_level(name), _build_schema(name))
    try:
        _wait_active(own)
        with ExitStack() as held:
            rejections = 0
            while rejections < _REJECTIONS:
                connection = _hold(own)
                if connection is None:
                    rejections += 1
                else:
                    held.enter_context(closing(connection))
                    rejections = 0
            yield
    finally:
        user.kubectl("delete", f"flowschema/{name}", f"prioritylevelconfiguration/{name}")


def _build_level(name: str) -> Json:
    limits = {"nominalConcurrencyShares": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}
    spec = {"type": "Limited", "limited": limits}
    return build_object(_LEVELS, name, spec=spec)


def _build_schema(name: str) -> Json:
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    accounts = {"kind": "Group", "group": {"name": f"system:serviceaccounts:{name}"}}
    spec = {
        "matchingPrecedence": _PRECEDENCE,
        "priorityLevelConfiguration": {"name": name},
        "rules": [{"subjects": [accounts], "resourceRules": [everything]}],
    }
    return build_object(_FLOW_SCHEMAS, name, spec=spec)


def _headers(own: ApartAgent) -> dict[str, str]:
    return {"Impersonate-User": f"system:serviceaccount:{own.space}:default"}


def _wait_active(own: ApartAgent) -> None:
    """Return once the API server applies the schema."""
    schema = own.bed.api.get(_FLOW_SCHEMAS, "", own.space) or {}

    def is_applied() -> bool:
        with closing(own.bed.api.connect()) as connection:
            connection.request("GET", CONFIG_MAPS.path(own.space), headers=_headers(own))
            return bool(connection.getresponse().headers[_SCHEMA_HEADER] == schema["metadata"]["uid"])

    wait_for(f"the FlowSchema {own.space} to be applied", is_applied, seconds=_SECONDS)


def _hold(own: ApartAgent) -> HTTPSConnection | None:
    """Begin a request that lasts until its connection is closed; None: the API server rejected it.

    Source: RFC 9110, section 10.1.1: a server that reads the body says so by 100 Continue.
    """
    connection = own.bed.api.connect()
    connection.putrequest("POST", CONFIG_MAPS.path(own.space))
    for key, value in (_headers(own) | {"Content-Length": "1", "Expect": "100-continue"}).items():
        connection.putheader(key, value)
    connection.endheaders()
    with connection.sock.makefile("rb") as answer:
        status = answer.readline().split()[1]
    if status == b"100":
        return connection
    connection.close()
    if status != b"429":
        raise BedError(f"the API server answers {status.decode()}")
    return None
