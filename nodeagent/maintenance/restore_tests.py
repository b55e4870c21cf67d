"""Restore tests by the leader: which volume of a repository is restored next, and what is known of those before.

Pure. The record is a part of the repository's verification (`nodeagent.maintenance.verification`). A Job of the leader
runs a command of the client, as the Jobs of a schedule do: the words of its command line are here, since both know
them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from msgspec import field as wire_field
from msgspec.structs import replace

from core.models.base import Int64, Time, WireModel
from core.models.names import RESTORE_TEST_COMMAND
from core.models.units import format_duration
from core.models.verification import VerificationOutcome

_ATTEMPTS: Final = 3
"""In a row, until another volume is tried: one that cannot be restored does not keep the others from it."""

_MOST_TESTED: Final = 200
_MESSAGE_CHARACTERS: Final = 1000
"""The annotation has a few kilobytes, and 60 KiB at most."""

NEVER: Final = datetime.min.replace(tzinfo=UTC)


def without_future(at: datetime | None, latest: datetime) -> datetime | None:
    """Return a time unless it is after `latest`."""
    return at if at is None or at <= latest else None


class JobTrack(WireModel, omit_defaults=True):
    """What is known of the Jobs of one kind; by default there was none.

    `job` is the creation of the last one whose end is stored, by the API server's clock. So many have failed in a row,
    the last one at `failed_at`, by the leader's clock, with that `message`.
    """

    job: Time | None = None
    failures: Int64 = 0
    failed_at: Time | None = None
    message: str = ""

    @property
    def succeeded(self) -> datetime | None:
        """The creation of the last Job; None: it failed, or there was none."""
        return self.job if self.failed_at is None else None

    def before(self, latest: datetime) -> Self:
        """Return the record without times after `latest`: a clock was wrong then."""
        return replace(self, job=without_future(self.job, latest), failed_at=without_future(self.failed_at, latest))

    def ended(self, created: datetime, failure: str | None = None, at: datetime | None = None) -> Self:
        """Return the record after a Job, `created` then; `failure` is why it failed, as was seen `at` that time."""
        if failure is None:
            return replace(self, job=created, failures=0, failed_at=None, message="")
        message = failure[:_MESSAGE_CHARACTERS]
        return replace(self, job=created, failures=self.failures + 1, failed_at=at, message=message)


class RestoreTests(JobTrack, omit_defaults=True):
    """What is known of the restore tests of one repository.

    `at` is the creation of the last Job that found something out, about the PVC `claim`, with this `outcome`. `tested`
    has when the Job was created that tested each PVC last, by its name. `tried` is the PVC of the last Job whose end is
    stored. These times are by the API server's clock.
    """

    at: Time | None = None
    claim: str = ""
    outcome: VerificationOutcome | None = None
    tested: dict[str, Time] = wire_field(default_factory=dict)
    tried: str = ""

    def before(self, latest: datetime) -> Self:
        """Return the record without times after `latest`: a clock was wrong then."""
        tested = {claim: when for claim, when in self.tested.items() if when <= latest}
        return replace(super().before(latest), at=without_future(self.at, latest), tested=tested)

    def found(self, created: datetime, claim: str, outcome: VerificationOutcome) -> Self:
        """Return the record after a Job, `created` then, that found out whether the PVC comes back."""
        tested = self.tested | {claim: created}
        after = self.ended(created)
        return replace(after, at=created, claim=claim, outcome=outcome, tested=tested, tried=claim)

    def failed(self, created: datetime, claim: str, message: str, at: datetime) -> Self:
        """Return the record after a Job, `created` then, that found nothing out, which was seen `at` that time."""
        after = self.ended(created, message, at)
        tested = self.tested | ({claim: created} if after.failures >= _ATTEMPTS else {})
        return replace(after, tested=tested, tried=claim)

    def only(self, claims: Collection[str]) -> Self:
        """Return the record without PVCs that are not among `claims`, and without the oldest tests of very many."""
        kept = sorted(((claim, at) for claim, at in self.tested.items() if claim in claims), key=lambda one: one[1])
        return replace(self, tested=dict(kept[-_MOST_TESTED:]))


@dataclass(frozen=True)
class RestorableCopy:
    """A complete copy of the volume of a PVC whose last verification did not fail, by its transfer."""

    claim: str
    created: datetime
    kind: str
    name: str


def choose_copy(tests: RestoreTests, copies: Iterable[RestorableCopy]) -> RestorableCopy | None:
    """Return the newest copy of the volume whose last test is the longest ago; None: no volume has a copy.

    A volume that could not be tested is tried again first, a few times. Volumes without a known test follow in the
    order of their names after the last one, so that each has its turn where more are tested than are remembered.
    """
    newest = {copy.claim: copy for copy in sorted(copies, key=lambda one: (one.created, one.name))}
    if tests.tried in newest and 0 < tests.failures < _ATTEMPTS:
        return newest[tests.tried]

    def turn(copy: RestorableCopy) -> tuple[datetime, bool, str]:
        return tests.tested.get(copy.claim, NEVER), copy.claim <= tests.tried, copy.claim

    return min(newest.values(), key=turn, default=None)


@dataclass(frozen=True)
class RestoreTestRequest:
    """What a Job tests: the transfer of a copy, by kind and name, in the agents' `namespace`.

    `storage_class` is the scratch volume's; None: as its PVC had it. `timeout` is how long restore and comparison may
    take.
    """

    kind: str
    name: str
    namespace: str
    timeout: timedelta
    storage_class: str | None = None

    @property
    def argv(self) -> list[str]:
        """The words of its command line, after the program: what `client.cli.run_restore_test` reads."""
        words = [RESTORE_TEST_COMMAND, self.kind, self.name, f"--agent-namespace={self.namespace}"]
        if self.storage_class:
            words.append(f"--storage-class={self.storage_class}")
        return [*words, f"--timeout={format_duration(self.timeout)}"]
