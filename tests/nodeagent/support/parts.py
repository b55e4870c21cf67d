"""The parts that both halves of an agent share, on a fake API server."""

import socket

from core.kube.resources import NODES, PODS
from exposer.template import AgentTemplate
from nodeagent.app import build_parts
from nodeagent.config.parse import parse_config
from nodeagent.metrics import Metrics
from nodeagent.runtime.api_server import ClockSkew
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentParts, AgentSpec
from tests.nodeagent.support.transfers import NAMESPACE, NODE
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object


def fake_parts(kube: FakeKube, text: str = "{}") -> AgentParts:
    """Return the parts of the agent on node `NODE` with the configuration document `text`."""
    kube.put(build_object(NODES, NODE))
    own = {"labels": {"role": "node-agent"}}
    kube.put(build_object(PODS, socket.gethostname().lower(), NAMESPACE, metadata=own, spec={"nodeName": NODE}))
    clock = LoopClock()
    settings = Settings(NODE, namespace=NAMESPACE)
    spec = AgentSpec(settings, NAMESPACE, parse_config(text), AgentTemplate("mover:1", host_pods="/host_pods"))
    metrics = Metrics(NODE)
    return build_parts(kube.client, clock, spec, metrics, ClockSkew(clock, metrics))
