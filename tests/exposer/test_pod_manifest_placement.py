"""Velero's decision tree for nodes, as a table, and the resulting node affinity."""

from itertools import product

import pytest

from exposer.pod_manifest import Placement, build_node_affinity
from exposer.pod_status import describe_nodes, diagnose_pod
from exposer.settings import Alternatives, PlacementRule, PlacementRules
from tests.support.objects import JsonDict


def requirement(value: str, key: str = "pool") -> JsonDict:
    return {"key": key, "operator": "In", "values": [value]}


def rule(value: str, storage_class: str = "") -> PlacementRule:
    return PlacementRule((requirement(value),), storage_class)


def values(alternatives: Alternatives) -> list[list[str]]:
    return [[value for one in rule for value in one["values"]] for rule in alternatives]


FAST, FAST_TOO, ALL, ALL_TOO = rule("a", "fast"), rule("b", "fast"), rule("c"), rule("d")


@pytest.mark.parametrize(
    ("rules", "storage_class", "first", "any_of"),
    [
        pytest.param((), "fast", [], [], id="no rules"),
        pytest.param((FAST,), "fast", [["a"]], [["a"]], id="its class"),
        pytest.param((FAST,), "slow", [], [], id="another class"),
        pytest.param((FAST,), "", [], [], id="no class"),
        pytest.param((ALL,), "slow", [["c"]], [["c"]], id="for all"),
        pytest.param((ALL, FAST), "fast", [["a"]], [["a"]], id="its class goes before all"),
        pytest.param((ALL, FAST), "slow", [["c"]], [["c"]], id="all, as its class has none"),
        pytest.param((ALL, FAST), "", [["c"]], [["c"]], id="all, as it has no class"),
        pytest.param((FAST, FAST_TOO), "fast", [["a"]], [["a"], ["b"]], id="two for its class"),
        pytest.param((ALL, ALL_TOO), "slow", [["c"]], [["c"], ["d"]], id="two for all"),
        pytest.param((ALL, FAST, ALL_TOO, FAST_TOO), "fast", [["a"]], [["a"], ["b"]], id="mixed, its class"),
        pytest.param((FAST, ALL, FAST_TOO, ALL_TOO), "slow", [["c"]], [["c"], ["d"]], id="mixed, another class"),
        pytest.param((PlacementRule((), "fast"), ALL), "fast", [[]], [[]], id="its class may go anywhere"),
    ],
)
def test_the_class_decides_first_and_then_the_order(
    rules: tuple[PlacementRule, ...], storage_class: str, first: list[list[str]], any_of: list[list[str]]
) -> None:
    assert values(PlacementRules(rules).choose(storage_class)) == first
    assert values(PlacementRules(rules, any_of=True).choose(storage_class)) == any_of


def terms(placement: Placement) -> list[JsonDict]:
    affinity = build_node_affinity(placement)["nodeAffinity"]
    found: list[JsonDict] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return found


NOT_WINDOWS = {"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]}


def test_a_volume_may_name_its_node() -> None:
    placement = Placement(topology=({"matchFields": [requirement("n", "metadata.name")]},), avoid_nodes=("m",))
    avoided = requirement("m", "metadata.name") | {"operator": "NotIn"}
    assert terms(placement) == [
        {"matchExpressions": [NOT_WINDOWS], "matchFields": [requirement("n", "metadata.name"), avoided]}
    ]


def unschedulable(placement: Placement) -> JsonDict:
    """Return a pod that cannot be scheduled."""
    text = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    return {
        "metadata": {"namespace": "velero", "name": "b1"},
        "spec": {"affinity": build_node_affinity(placement)},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(), None),
        (Placement(node="n"), "metadata.name=n"),
        (Placement(avoid_nodes=("m", "n")), "metadata.name!=m, metadata.name!=n"),
        (Placement(alternatives=((requirement("a"),), (requirement("b"),))), "pool=a; or pool=b"),
        (
            Placement(
                topology=({"matchExpressions": [requirement("a", "zone") | {"values": ["a", "b"]}]},),
                alternatives=(({"key": "spot", "operator": "DoesNotExist"}, {"key": "disk", "operator": "Exists"}),),
            ),
            "zone=a|b, spot is not set, disk is set",
        ),
        (Placement(alternatives=(({"key": "size", "operator": "Gt", "values": ["3"]},),)), "size Gt 3"),
    ],
    ids=["any", "one", "not some", "rules", "zone and rule", "number"],
)
def test_an_unschedulable_pod_reports_the_required_nodes(placement: Placement, text: str | None) -> None:
    """The scheduler does not report the requirements: a rule and a volume's zone may contradict each other."""
    pod = unschedulable(placement)
    found = diagnose_pod(pod)
    assert describe_nodes(pod) == text
    assert found is not None
    assert found.message.endswith(f" (required nodes: {text})" if text else "node affinity/selector.")


def matches(requirement: JsonDict, labels: dict[str, str]) -> bool:
    inside = labels.get(requirement["key"]) in requirement["values"]
    return inside if requirement["operator"] == "In" else not inside


def eligible(placement: Placement, node: dict[str, str]) -> bool:
    """Return whether a node with these labels, its name among them, is eligible."""
    return any(
        all(matches(one, node) for one in [*term["matchExpressions"], *term.get("matchFields", [])])
        for term in terms(placement)
    )


def test_a_node_is_eligible_if_it_meets_all_requirements() -> None:
    """Every combination of requirements, for every kind of node."""
    labels = ("metadata.name", "kubernetes.io/os", "zone", "pool")
    nodes = [dict(zip(labels, values, strict=True)) for values in product("nm", ("linux", "windows"), "abc", "xyz")]
    zones, pools = ((), ("a",), ("a", "b")), ((), ("x",), ("x", "y"))
    for name, avoided, reach, rules in product(("", "n"), ((), ("m",)), zones, pools):
        placement = Placement(
            node=name,
            avoid_nodes=avoided,
            alternatives=tuple((requirement(pool),) for pool in rules),
            topology=tuple({"matchExpressions": [requirement(zone, "zone")]} for zone in reach),
        )
        for node in nodes:
            expected = (
                node["kubernetes.io/os"] != "windows"
                and node["metadata.name"] in (name or "nm")
                and node["metadata.name"] not in avoided
                and (not reach or node["zone"] in reach)
                and (not rules or node["pool"] in rules)
            )
            assert eligible(placement, node) is expected, (placement, node)
