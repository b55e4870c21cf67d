"""The flags that name PVCs, of commands with and without click."""

from collections.abc import Sequence

from core.errors import ConfigError
from core.models.names import OBJECT_NAME
from nodeagent.operations.backups.plan import ClaimName

__all__ = ["parse_claim", "parse_claims"]


def parse_claims(words: Sequence[str], namespace: str, selector: str | None) -> tuple[ClaimName, ...]:
    """Return the PVCs that `--pvc` names; none if a selector chooses them.

    Raises:
        ConfigError: the options do not say which PVCs.
    """
    if selector is not None:
        if words or not namespace:
            raise ConfigError("-l selects PVCs of the namespace that -n names, and excludes --pvc")
        return ()
    if not words:
        raise ConfigError('no PVC: set --pvc NAMESPACE/NAME, or -n NAMESPACE -l LABELS (-l "": all of them)')
    return tuple(parse_claim(word, namespace) for word in words)


def parse_claim(word: str, namespace: str) -> ClaimName:
    """Return the PVC that a word names, alone or in the namespace of `-n`.

    Raises:
        ConfigError: it names none.
    """
    before, slash, after = word.partition("/")
    found = ClaimName(before, after) if slash else ClaimName(namespace, before)
    if not (OBJECT_NAME.fullmatch(found.namespace) and OBJECT_NAME.fullmatch(found.name)):
        raise ConfigError(f'--pvc: "{word}" is not allowed: expected NAMESPACE/NAME, or NAME beside -n NAMESPACE')
    return found
