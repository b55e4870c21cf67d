"""Copy holders: which transfer has, or may create next, the copy of a Secret or ConfigMap.

Only one copy of a name can exist in the agent's namespace. A transfer that needs one stays New while another
holds the name, so that it does not use the admission quota meanwhile.
"""

from collections.abc import Iterable

from core.models.phases import Phase
from core.models.reasons import PendingReason
from exposer.ownership import copy_in_use
from nodeagent.leader.index import Entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState

__all__ = ["CopyHolders"]


class CopyHolders:
    """The holders, by the object's kind and name, such as `Secret/token`."""

    def __init__(self) -> None:
        """Know none."""
        self._holders: dict[str, Entry] = {}
        self._pending: dict[str, tuple[str, ...]] = {}

    def count(self, entries: Iterable[Entry]) -> list[str]:
        """Find out again who holds what.

        A transfer that is not New holds what it was accepted with until it is cleaned up; one that was ready when
        it was last checked holds its names while it is New, since its accept may be under way.

        Args:
            entries: all transfers.

        Returns:
            The uids of the pending transfers that are due: something that they need is free.
        """
        new: set[str] = set()
        holders: dict[str, Entry] = {}
        for entry in entries:
            if entry.phase is Phase.NEW:
                if entry.managed:
                    new.add(entry.uid)
            elif entry.copies and (entry.finalizer or not entry.phase.final):
                holders |= dict.fromkeys(entry.copies, entry)
        holders = {name: entry for name, entry in self._holders.items() if entry.uid in new} | holders
        free = self._holders.keys() - holders.keys()
        woken = [uid for uid, names in self._pending.items() if uid in new and not free.isdisjoint(names)]
        self._holders = holders
        self._pending = {uid: names for uid, names in self._pending.items() if uid in new and uid not in woken}
        return woken

    def release(self, uid: str) -> None:
        """Forget what a New transfer holds: it is checked again."""
        self._holders = {name: entry for name, entry in self._holders.items() if entry.uid != uid}
        self._pending.pop(uid, None)

    def admit(self, entry: Entry, admission: Admission) -> Admission:
        """Return `admission`, or that the transfer is pending because another one holds what it needs.

        Args:
            entry: the transfer.
            admission: the result of its kind's check.
        """
        if admission.reason == PendingReason.COPY_IN_USE:
            # The copy itself was found: its holder may have been accepted by another leader.
            self._pending[entry.uid] = admission.copies
        if admission.decision is not AdmissionState.READY or not admission.copies:
            return admission
        for name in admission.copies:
            holder = self._holders.get(name)
            if holder is not None and holder.uid != entry.uid:
                self._pending[entry.uid] = admission.copies
                in_use = copy_in_use(*name.split("/", 1))
                return Admission(AdmissionState.PENDING, in_use.reason, in_use.message, indefinite=True)
        self._holders |= dict.fromkeys(admission.copies, entry)
        return admission
