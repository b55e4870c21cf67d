"""What in a valid configuration may not do what its writer thinks.

Knows which settings have no effect beside, or without, others. Does not know mistakes
(`nodeagent.config`): all of this is tolerated.
"""

from collections import Counter

from nodeagent.config_keys import Finding, show_key
from nodeagent.config_models import AffinityMode, AgentConfig

__all__ = ["advise"]


def advise(config: AgentConfig) -> list[Finding]:
    """Return a note on each setting of `config` that changes nothing, or more than it seems to."""
    return [*_on_affinity(config), *_on_backup_claims(config), *_on_cache(config), *_on_rules(config)]


def _on_affinity(config: AgentConfig) -> list[Finding]:
    if config.load_affinity_mode is AffinityMode.ANY:
        return []
    notes = []
    seen: Counter[str] = Counter()
    for index, entry in enumerate(config.load_affinity):
        seen[entry.storage_class] += 1
        if seen[entry.storage_class] > 1:
            which = f"for the class {entry.storage_class}" if entry.storage_class else "without a storage class"
            problem = f"only the first entry {which} counts; this one changes nothing"
            hint = '"loadAffinityMode": "any" makes them alternatives'
            notes.append(Finding(f"loadAffinity[{index}]", problem, hint))
    return notes


def _on_backup_claims(config: AgentConfig) -> list[Finding]:
    return [
        Finding(f"backupPVC{show_key(name)}.spcNoRelabeling", "it changes nothing without readOnly")
        for name, claim in config.backup_pvc.items()
        if claim.spc_no_relabeling and not claim.read_only
    ]


def _on_cache(config: AgentConfig) -> list[Finding]:
    cache = config.cache_pvc
    if cache.resident_threshold_in_mb and not cache.storage_class:
        return [Finding("cachePVC", "without storageClass there is no cache volume")]
    return []


def _on_rules(config: AgentConfig) -> list[Finding]:
    return [
        Finding("loadConcurrency.perNodeConfig", f"the rule for {rule.number} has no nodeSelector: every node matches")
        for rule in config.load_concurrency.per_node_config
        if rule.node_selector.empty
    ]
