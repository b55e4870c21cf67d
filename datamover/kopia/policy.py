"""The policy of a source in the repository: Velero's, which is set before its first backup, and what it leaves out.

Source: kopia 0.23.1, cli/command_policy_set.go, snapshot/upload/upload.go (effectiveParallelFileReads),
snapshot/policy/files_policy.go, fs/ignorefs/ignorefs.go; tests/recordings/velero-1.18.2/kopia-policies.json.
"""

import json
from dataclasses import dataclass
from typing import Final

from core.models.base import JsonDict
from core.models.compression import Compression
from datamover.kopia.storage_calls import KopiaCaller

__all__ = ["SourcePolicy", "decide_policy", "describe_exclusions", "ensure_policy", "read_policy"]

_UNLIMITED: Final = 2**31 - 1
_PERIODS: Final = ("Latest", "Hourly", "Daily", "Weekly", "Monthly", "Annual")

_PARALLEL_ABOVE_MIB: Final = 2048

_NO_IGNORE_FILE: Final = "."
"""Where kopia looks for a file with rules, instead of `.kopiaignore`: each directory has it, and it is never a file.

An empty list does not help: kopia then inherits the name, in the end from its own default.
"""


@dataclass(frozen=True)
class SourcePolicy:
    """What a backup sets in the policy of its source.

    `parallel` is the most files that are read at a time; kopia ignores a `--parallel` above it. `compression` is the
    algorithm for what is stored from now on; Velero compresses nothing, and sets that again. With `ignore_files`, files
    named `.kopiaignore` have an effect.
    """

    parallel: int
    compression: Compression = Compression.NONE
    ignore_files: bool = False


async def ensure_policy(kopia: KopiaCaller, target: str, wanted: SourcePolicy, *, first: bool = False) -> None:
    """Set the policy that Velero sets, unless the source has it already.

    Different from Velero's: directories marked as caches are kept, or their content would be missing, and so is what a
    `.kopiaignore` names. What else an operator has set for the source stays.

    Args:
        kopia: runs kopia, connected to the repository.
        target: the source in kopia's format: `user@host:path`.
        wanted: the policy.
        first: the source has no snapshot, so it hardly has a policy: it is set without being looked at.
    """
    names: list[str] = []
    if not first:
        policy = await read_policy(kopia, target)
        if _policy_matches(policy, wanted) and _allowed_reads(policy) >= wanted.parallel:
            return
        names = _ignore_files(policy)
    change = await kopia.call(
        _describe(target),
        "policy",
        "set",
        target,
        *(f"--keep-{period.lower()}={_UNLIMITED}" for period in _PERIODS),
        "--manual",
        f"--compression={wanted.compression}",
        "--ignore-unknown-types=true",
        "--ignore-cache-dirs=false",
        *(
            ["--clear-dot-ignore"]
            if wanted.ignore_files
            else [f"--add-dot-ignore={_NO_IGNORE_FILE}", *(f"--remove-dot-ignore={name}" for name in names)]
        ),
        f"--max-parallel-file-reads={wanted.parallel}",
        f"--parallel-upload-above-size-mib={_PARALLEL_ABOVE_MIB}",
    )
    change.check()


def decide_policy(defined: JsonDict | None, effective: JsonDict, wanted: SourcePolicy) -> JsonDict | None:
    """Return what `ensure_policy` makes of the policy that a source has of its own; None: nothing needs to change.

    Args:
        defined: the source's own policy, None without one.
        effective: the same with all that it inherits.
        wanted: the policy.
    """
    if _policy_matches(effective, wanted) and _allowed_reads(effective) >= wanted.parallel:
        return None
    own = defined or {}
    files = own.get("files") or {}
    names = sorted({*(files.get("ignoreDotFiles") or ()), _NO_IGNORE_FILE} - {*_ignore_files(effective)})
    changes: JsonDict = {
        "retention": {f"keep{period}": _UNLIMITED for period in _PERIODS},
        "scheduling": {"manual": True},
        "compression": {"compressorName": str(wanted.compression)},
        "errorHandling": {"ignoreUnknownTypes": True},
        "files": {"ignoreCacheDirs": False, "ignoreDotFiles": [] if wanted.ignore_files else names},
        "upload": {"maxParallelFileReads": wanted.parallel, "parallelUploadAboveSize": _PARALLEL_ABOVE_MIB << 20},
    }
    return {**own, **{part: {**(own.get(part) or {}), **values} for part, values in changes.items()}}


async def read_policy(kopia: KopiaCaller, target: str) -> JsonDict:
    """Return the effective policy of a source, with all that it inherits.

    Raises:
        KopiaError: it could not be read.
    """
    shown = await kopia.call(_describe(target), "policy", "show", "--json", target)
    return shown.check().document()


def describe_exclusions(policy: JsonDict) -> list[str]:
    """Return what an effective policy leaves out of backups, each as a fragment of a sentence."""
    files, errors = policy.get("files") or {}, policy.get("errorHandling") or {}
    found = []
    if rules := files.get("ignore"):
        found.append(f"what its ignore rules name ({', '.join(map(json.dumps, rules))})")
    if names := _ignore_files(policy):
        found.append(f"what files named {' or '.join(names)} list")
    if size := files.get("maxFileSize"):
        found.append(f"files larger than {size} bytes")
    if files.get("oneFileSystem"):
        found.append("other file systems that are mounted in it")
    if errors.get("ignoreFileErrors") or errors.get("ignoreDirectoryErrors"):
        found.append("what cannot be read")
    return found


def _describe(target: str) -> str:
    return f"policy of {target.partition(':')[2]}"


def _ignore_files(policy: JsonDict) -> list[str]:
    """Return the names of the files in a volume whose rules count."""
    return [name for name in (policy.get("files") or {}).get("ignoreDotFiles") or [] if name != _NO_IGNORE_FILE]


def _allowed_reads(policy: JsonDict) -> int:
    return int((policy.get("upload") or {}).get("maxParallelFileReads") or 0)


def _policy_matches(policy: JsonDict, wanted: SourcePolicy) -> bool:
    retention = policy.get("retention") or {}
    return (
        all(retention.get(f"keep{period}") == _UNLIMITED for period in _PERIODS)
        and (policy.get("scheduling") or {}).get("manual") is True
        and (policy.get("compression") or {}).get("compressorName") == wanted.compression
        and (policy.get("errorHandling") or {}).get("ignoreUnknownTypes") is True
        and (policy.get("files") or {}).get("ignoreCacheDirs") is False
        and bool(_ignore_files(policy)) is wanted.ignore_files
    )
