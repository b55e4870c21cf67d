"""What loads are exposed by: configuration becomes the parameters of exposers.

Knows which key becomes which parameter. Does not know what a key may hold
(`nodeagent.config.models`), nor what exposers make of a parameter.
"""

from collections.abc import Callable

from exposer.placement import PlacementRule, PlacementRules
from exposer.settings import BackupPVCSettings, CacheRule, MoverOptions, MoverPlan, PodSettings
from exposer.template import AgentTemplate
from nodeagent.config.current import CurrentConfig
from nodeagent.config.models import INHERIT, AffinityMode, AgentConfig, BackupPVC
from nodeagent.config.selectors import LabelSelector

__all__ = ["MoverPlans"]

_Inputs = tuple[AgentConfig, str, int]
"""What a plan depends on: the configuration, the priority class that the cluster has, the cache limit."""


class MoverPlans:
    """The plan in force: what the configuration makes of it at the moment."""

    def __init__(
        self,
        template: AgentTemplate,
        options: MoverOptions,
        *,
        current: CurrentConfig,
        priority_class: Callable[[], str],
        cache_limit_mib: Callable[[], int],
    ) -> None:
        """Plan movers that inherit `template` and are told `options`.

        `priority_class` tells the class that the cluster has at the moment, if any.
        `cache_limit_mib` tells how large the caches of new repositories may become.
        """
        self._template = template
        self._options = options
        self._current = current
        self._priority_class = priority_class
        self._cache_limit_mib = cache_limit_mib
        self._planned: MoverPlan | None = None
        self._planned_for: _Inputs | None = None

    def __call__(self) -> MoverPlan:
        """Return the plan for a load that is exposed now."""
        now = (self._current.config, self._priority_class(), self._cache_limit_mib())
        # It is asked for at every look at a load, and is another one only after an edit.
        if self._planned is None or self._planned_for is None or not _same(self._planned_for, now):
            self._planned, self._planned_for = self._build(*now), now
        return self._planned

    def _build(self, config: AgentConfig, priority_class: str, cache_limit_mib: int) -> MoverPlan:
        cache = config.cache_pvc
        return MoverPlan(
            template=self._template,
            settings=_pod_settings(config, priority_class),
            options=self._options,
            nodes=_node_rules(config),
            backup_pvcs={source: _backup_pvc(entry) for source, entry in config.backup_pvc.items()},
            ignore_delay_binding=config.restore_pvc.ignore_delay_binding,
            cache=CacheRule(cache.storage_class, cache_limit_mib, cache.resident_threshold_in_mb)
            if cache.storage_class
            else None,
        )


def _same(before: _Inputs, now: _Inputs) -> bool:
    """Whether nothing changed: a configuration is frozen, so that its identity tells."""
    return before[0] is now[0] and before[1:] == now[1:]


def _backup_pvc(entry: BackupPVC) -> BackupPVCSettings:
    return BackupPVCSettings(
        storage_class=entry.storage_class,
        read_only=entry.read_only,
        no_relabeling=entry.spc_no_relabeling,
        annotations=dict(entry.annotations),
    )


def _pod_settings(config: AgentConfig, priority_class: str) -> PodSettings:
    inherit = config.tolerations == INHERIT
    return PodSettings(
        priority_class_name=priority_class,
        resources=config.pod_resources.to_wire(),
        labels=dict(config.pod_labels),
        annotations=dict(config.pod_annotations),
        tolerations=() if inherit else tuple(t.to_wire() for t in config.tolerations if not isinstance(t, str)),
        inherit_tolerations=inherit,
        privileged_fs_backup=config.privileged_fs_backup,
    )


def _node_rules(config: AgentConfig) -> PlacementRules:
    rules = tuple(
        PlacementRule(tuple(_requirements(entry.node_selector)), entry.storage_class) for entry in config.load_affinity
    )
    return PlacementRules(rules, any_of=config.load_affinity_mode is AffinityMode.ANY)


def _requirements(selector: LabelSelector) -> list[dict[str, object]]:
    """Return a selector of nodes as a pod's `matchExpressions`."""
    named: list[dict[str, object]] = [
        {"key": key, "operator": "In", "values": [value]} for key, value in sorted(selector.match_labels.items())
    ]
    told = [requirement.model_dump(mode="json", by_alias=True) for requirement in selector.match_expressions]
    # The API server refuses an empty list of values beside Exists.
    return named + [{key: value for key, value in one.items() if value != []} for one in told]
