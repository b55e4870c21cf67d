"""Every address, name and size of the test bed.

Knows nothing of processes or files. All addresses live in a network namespace of
the test bed's own, so fixed ones cannot clash with the machine's or with another test bed's.
"""

SERVICE_RANGE = "10.96.0.0/24"
SERVICE_ADDRESS = "10.96.0.1"
"""The API server listens here itself, on `lo`, so pods reach it without kube-proxy."""

API_PORT = 443

S3_ADDRESS = "10.97.0.1"
S3_PORT = 7070
BUCKET = "velero"

S3_ACCESS_KEY = "examplekey"
S3_SECRET_KEY = "examplesecret"
"""Only the test bed reaches its S3 server. Fixed, so that `examples/credentials.yaml` works unchanged."""

AGENT_IMAGE = "node-agent:dev"
PAUSE_IMAGE = "node-agent-pause:dev"
VELERO_IMAGE = "docker.io/velero/velero:v1.18.2"
"""Not Velero's image: in the test bed this name refers to a program that only waits until it is to end."""


def node_name(index: int) -> str:
    """The name of a node; nodes are counted from 1."""
    return f"bed-{index}"


def node_address(index: int) -> str:
    """The address of a node; it is not a loopback address, which the API server would reject."""
    return f"10.97.0.{index}"


def pod_subnet(index: int) -> str:
    """The subnet from which the pods of a node get their addresses."""
    return f"10.98.{index}.0/24"
