"""The policy of a source in the repository: Velero's, which is set before its first backup, and what it leaves out.

With kopia's own commands, exclusions are in it while a backup runs. A pattern that no path can have says what they
changed, so that the next backup takes back what one left that was killed.

Source: kopia 0.23.1, cli/command_policy_set.go, snapshot/upload/upload.go (effectiveParallelFileReads),
snapshot/policy/files_policy.go, fs/ignorefs/ignorefs.go; tests/recordings/velero-1.18.2/kopia-policies.json.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import ContractError, KopiaError
from core.models.base import JsonDict, WireModel
from core.models.transfer_settings import Compression, Exclusions
from datamover.kopia.storage_calls import KopiaCaller

_logger = logging.getLogger(__name__)

_UNLIMITED: Final = 2**31 - 1
_PERIODS: Final = ("Latest", "Hourly", "Daily", "Weekly", "Monthly", "Annual")

_PARALLEL_ABOVE_MIB: Final = 2048

_MARK: Final = "/.nodeagent.io-exclusions/"

_CLEARED_WITHIN: Final = timedelta(seconds=20)
_CLEARED_CANCELED: Final = timedelta(seconds=1)
"""A canceled transfer ends within 2 seconds."""

_NO_IGNORE_FILE: Final = "."
"""Where kopia looks for a file with rules, instead of `.kopiaignore`: each directory has it, and it is never a file. An
empty list does not help: kopia then inherits the name, in the end from its own default."""


@dataclass(frozen=True)
class SourcePolicy:
    """What a backup sets in the policy of its source.

    `parallel` is the most files that are read at a time: kopia ignores a `--parallel` above it. Velero compresses
    nothing, and sets that again. With `ignore_files`, files named `.kopiaignore` have an effect.
    """

    parallel: int
    compression: Compression = Compression.NONE
    ignore_files: bool = False


class _Undo(WireModel, omit_defaults=True):
    """What exclusions have changed: the patterns that they added, and the size limit and the switch before."""

    added: tuple[str, ...] = ()
    max_bytes: int | None = None
    one_file_system: bool | None = None
    size_changed: bool = False
    switch_changed: bool = False

    @property
    def mark(self) -> str:
        """The pattern that says so: it names a directory in one of this name, which no volume has."""
        return f"{_MARK}{base64.urlsafe_b64encode(self.to_json().encode()).decode()}/"

    @property
    def flags_back(self) -> list[str]:
        """What takes it back."""
        return self.flags("remove", self.max_bytes, one_file_system=self.one_file_system)

    def flags(self, verb: str, max_bytes: int | None, *, one_file_system: bool | None) -> list[str]:
        """Return what changes a policy in the same parts: `add` or `remove` is for patterns."""
        size = "inherit" if max_bytes is None else str(max_bytes)
        switch = "inherit" if one_file_system is None else str(one_file_system).lower()
        return [
            *(f"--{verb}-ignore={pattern}" for pattern in (*self.added, self.mark)),
            *([f"--max-file-size={size}"] if self.size_changed else []),
            *([f"--one-file-system={switch}"] if self.switch_changed else []),
        ]


def _read_undo(policy: JsonDict) -> list[_Undo]:
    """Return what backups that were killed have left in a policy."""
    found = []
    for pattern in (policy.get("files") or {}).get("ignore") or []:
        if pattern.startswith(_MARK):
            # Nothing else writes such a pattern; an invalid one has no effect.
            with suppress(ValueError, ContractError):
                text = base64.urlsafe_b64decode(pattern.removeprefix(_MARK).rstrip("/"))
                found.append(_Undo.from_json(text.decode()))
    return found


def _take_back(own: JsonDict) -> JsonDict:
    """Return a policy without what backups that were killed have left in it."""
    for undo in _read_undo(own):
        files = dict(own["files"])
        files["ignore"] = [one for one in files["ignore"] if one not in {*undo.added, undo.mark}]
        if undo.size_changed:
            files["maxFileSize"] = undo.max_bytes
        if undo.switch_changed:
            files["oneFileSystem"] = undo.one_file_system
        own = {**own, "files": {name: value for name, value in files.items() if value is not None}}
    return own


def _plan_undo(own: JsonDict, effective: JsonDict, exclude: Exclusions) -> _Undo:
    """Return what the exclusions change in a source's own policy: what an operator has set there, or above, stays.

    Rules of its own hide those that it inherits from then on, so it gets these too.
    """
    files, all_files = own.get("files") or {}, effective.get("files") or {}
    limit, known = all_files.get("maxFileSize") or None, files.get("ignore") or []
    wanted = (*exclude.patterns, *(() if known else all_files.get("ignore") or ()))
    return _Undo(
        added=tuple(one for one in dict.fromkeys(wanted) if one not in known),
        max_bytes=files.get("maxFileSize") or None,
        one_file_system=files.get("oneFileSystem"),
        size_changed=exclude.max_bytes is not None and (limit is None or exclude.max_bytes < limit),
        switch_changed=exclude.one_file_system and not all_files.get("oneFileSystem"),
    )


@asynccontextmanager
async def excluding(kopia: KopiaCaller, target: str, exclude: Exclusions) -> AsyncIterator[None]:
    """Have exclusions in the policy of a source within the block: kopia reads it when a backup begins.

    What could not be taken back, the next backup takes back before it begins. Raises KopiaError without access to it.
    """
    if not exclude:
        yield
        return
    effective = await _read_cleared(kopia, target)
    undo = _plan_undo(await _read_own(kopia, target), effective, exclude)
    within = _CLEARED_WITHIN
    try:
        await _change(kopia, target, undo.flags("add", exclude.max_bytes, one_file_system=True))
        yield
    except asyncio.CancelledError:
        within = _CLEARED_CANCELED
        raise
    finally:
        try:
            clear = partial(_change, kopia, target, undo.flags_back)
            await run_shielded(clear, name="clear-exclusions", deadline=Deadline.after(SystemClock(), within))
        except (TimeoutError, KopiaError) as e:
            _logger.warning("exclusions stay in the %s, the next backup removes them: %s", _describe(target), e)


async def _read_cleared(kopia: KopiaCaller, target: str) -> JsonDict:
    """Return the policy, after what backups that were killed left in it is removed."""
    policy = await read_policy(kopia, target)
    if not (left := _read_undo(policy)):
        return policy
    for undo in left:
        await _change(kopia, target, undo.flags_back)
    return await read_policy(kopia, target)


async def _read_own(kopia: KopiaCaller, target: str) -> JsonDict:
    """Return what a source's policy has of its own, without what it inherits."""
    answer = await kopia.call(_describe(target), "policy", "export", target)
    if not answer.succeeded and answer.mentions("policy not found"):
        return {}
    own: JsonDict = next(iter(answer.check().document().values()), {})
    return own


async def _change(kopia: KopiaCaller, target: str, flags: Sequence[str]) -> None:
    (await kopia.call(_describe(target), "policy", "set", target, *flags)).check()


async def ensure_policy(kopia: KopiaCaller, target: str, wanted: SourcePolicy) -> None:
    """Set the policy that Velero sets, unless the source, in kopia's format `user@host:path`, has it already.

    Different from Velero's: directories marked as caches are kept, or their content would be missing, and so is what a
    `.kopiaignore` names. What else an operator has set for the source stays.
    """
    policy = await _read_cleared(kopia, target)
    if _policy_matches(policy, wanted):
        return
    names = _ignore_files(policy)
    flags = [
        *(f"--keep-{period.lower()}={_UNLIMITED}" for period in _PERIODS),
        "--manual",
        "--ignore-identical-snapshots=false",
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
    ]
    await _change(kopia, target, flags)


def decide_policy(defined: JsonDict | None, effective: JsonDict, wanted: SourcePolicy) -> JsonDict | None:
    """Return what `ensure_policy` makes of the policy that a source has of its own; None: nothing needs to change.

    `defined` is its own policy, None without one, and `effective` the same with all that it inherits.
    """
    own = _take_back(defined or {})
    if own == (defined or {}) and _policy_matches(effective, wanted):
        return None
    files = own.get("files") or {}
    names = sorted({*(files.get("ignoreDotFiles") or ()), _NO_IGNORE_FILE} - {*_ignore_files(effective)})
    changes = _fixed_values(wanted)
    changes["files"]["ignoreDotFiles"] = [] if wanted.ignore_files else names
    changes["upload"] = {"maxParallelFileReads": wanted.parallel, "parallelUploadAboveSize": _PARALLEL_ABOVE_MIB << 20}
    # kopia rejects a schedule beside this.
    own = {**own, "scheduling": {}}
    return {**own, **{part: {**(own.get(part) or {}), **values} for part, values in changes.items()}}


async def read_policy(kopia: KopiaCaller, target: str) -> JsonDict:
    """Return the effective policy of a source, with all that it inherits. Raises KopiaError if it could not be read."""
    shown = await kopia.call(_describe(target), "policy", "show", "--json", target)
    return shown.check().document()


def describe_exclusions(policy: JsonDict, *, counted: bool = True) -> list[str]:
    """Return what an effective policy leaves out of backups, each as a fragment of a sentence.

    Without `counted`, only what kopia does not count.
    """
    files, errors = policy.get("files") or {}, policy.get("errorHandling") or {}
    found = []
    if counted and (rules := files.get("ignore")):
        found.append(f"what its ignore rules name ({', '.join(map(json.dumps, rules))})")
    if counted and (names := _ignore_files(policy)):
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


def _fixed_values(wanted: SourcePolicy) -> JsonDict:
    """Return what a policy must have exactly, by its parts."""
    return {
        "retention": {**{f"keep{period}": _UNLIMITED for period in _PERIODS}, "ignoreIdenticalSnapshots": False},
        "scheduling": {"manual": True},
        "compression": {"compressorName": str(wanted.compression)},
        "errorHandling": {"ignoreUnknownTypes": True},
        "files": {"ignoreCacheDirs": False},
    }


def _policy_matches(policy: JsonDict, wanted: SourcePolicy) -> bool:
    reads = int((policy.get("upload") or {}).get("maxParallelFileReads") or 0)
    return (
        all(values.items() <= (policy.get(part) or {}).items() for part, values in _fixed_values(wanted).items())
        and bool(_ignore_files(policy)) is wanted.ignore_files
        and reads >= wanted.parallel
    )
