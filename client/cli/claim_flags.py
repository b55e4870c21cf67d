"""The flags that name PVCs, and labels of their transfers, of commands with and without click."""

from collections.abc import Sequence

from client.backups.plan import ClaimName
from core.errors import ConfigError
from core.models.names import OBJECT_NAME

__all__ = ["parse_claim", "parse_claims", "parse_pairs"]


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


def parse_pairs(flag: str, text: str) -> dict[str, str]:
    """Return the labels or annotations in the value of a flag: `KEY=VALUE,...`.

    Raises:
        ConfigError: a part is none.
    """
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f'{flag}: "{part}" is not allowed: expected KEY=VALUE')
        pairs[key.strip()] = value.strip()
    return pairs
