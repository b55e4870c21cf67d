"""The policy of a source in the repository: Velero's, which is set before its first backup.

Source: kopia 0.23.1, cli/command_policy_set.go, snapshot/upload/upload.go (effectiveParallelFileReads);
tests/recordings/velero-1.18.2/kopia-policies.json.
"""

from typing import Final

from core.models.base import JsonDict
from core.models.compression import Compression
from datamover.kopia.storage_calls import KopiaCaller

__all__ = ["ensure_policy"]

_UNLIMITED: Final = 2**31 - 1
_PERIODS: Final = ("Latest", "Hourly", "Daily", "Weekly", "Monthly", "Annual")


async def ensure_policy(
    kopia: KopiaCaller, target: str, *, parallel: int, compression: Compression, first: bool = False
) -> None:
    """Set the policy that Velero sets, unless the source has it already.

    Different from Velero's: directories marked as caches are kept, or their content would be missing.

    Args:
        kopia: runs kopia, connected to the repository.
        target: the source in kopia's format: `user@host:path`.
        parallel: the most files that are read at a time; kopia ignores a `--parallel` above what the policy has.
        compression: the algorithm for what is stored from now on; Velero compresses nothing, and sets that again.
        first: the source has no snapshot, so it hardly has a policy: it is set without being looked at.
    """
    attempted = f"policy of {target.partition(':')[2]}"
    if not first:
        shown = await kopia.call(attempted, "policy", "show", "--json", target)
        policy = shown.check().document()
        if _policy_matches(policy, compression) and _allowed_reads(policy) >= parallel:
            return
    change = await kopia.call(
        attempted,
        "policy",
        "set",
        target,
        *(f"--keep-{period.lower()}={_UNLIMITED}" for period in _PERIODS),
        "--manual",
        f"--compression={compression}",
        "--ignore-unknown-types=true",
        "--ignore-cache-dirs=false",
        f"--max-parallel-file-reads={parallel}",
        "--parallel-upload-above-size-mib=2048",
    )
    change.check()


def _allowed_reads(policy: JsonDict) -> int:
    return int((policy.get("upload") or {}).get("maxParallelFileReads") or 0)


def _policy_matches(policy: JsonDict, compression: Compression) -> bool:
    retention = policy.get("retention") or {}
    return (
        all(retention.get(f"keep{period}") == _UNLIMITED for period in _PERIODS)
        and (policy.get("scheduling") or {}).get("manual") is True
        and (policy.get("compression") or {}).get("compressorName") == compression
        and (policy.get("errorHandling") or {}).get("ignoreUnknownTypes") is True
        and (policy.get("files") or {}).get("ignoreCacheDirs") is False
    )
