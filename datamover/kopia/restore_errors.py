"""kopia's errors for single entries of a restore: what the target refused, and what makes going on useless.

With `--ignore-errors` kopia goes on after an entry that it could not write, writes one line for it, and exits with 0.
It also goes on where the repository cannot be read, or nothing more fits: those errors are none of a single entry.
Source: kopia 0.23.1, snapshot/restore/restore.go (copyEntry), local_fs_output.go; Go 1.26, io/fs.PathError; errno(3).
"""

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from datamover.kopia.process import KopiaAnswer

__all__ = ["FULL", "TARGET_FAILURES", "IgnoredErrors", "is_refusal", "match_texts"]

_IGNORED: Final = re.compile(r"ignored error (.*)")
_FAILED: Final = re.compile(r"error restoring: restore error: (.*)")

_CONTENT: Final = re.compile(
    r"copy file: error creating file: (cannot write data to file|unable to open snapshot file|close )"
    r"|error reading (directory|link target)|invalid FS entry type"
)
"""The content of an entry: the repository could not be read, or the file is not what was written."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
TARGET_FAILURES: Final = FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN}
"""Errors of the target as a whole: every other file would fail too."""


def match_texts(errors: Iterable[int]) -> str:
    """Return the pattern of kopia's texts for these errors of the system.

    Source: Go 1.26, syscall/zerrors_linux_amd64.go (the texts of the C library, in lower case).
    """
    return "|".join(re.escape(os.strerror(one).lower()) for one in sorted(errors))


_WHOLE: Final = re.compile(f": ({match_texts(TARGET_FAILURES)})( on |$)")

_ATTRIBUTES: Final = "error setting attributes"
"""The entry itself is restored."""


def is_refusal(answer: KopiaAnswer) -> bool:
    """Return whether kopia ended because the target refused an entry, so that it can restore the others."""
    if answer.succeeded or answer.crashed:
        return False
    errors = [found[1] for line in answer.lines if (found := _FAILED.search(line))]
    return bool(errors) and not any(_is_fatal(line) for line in answer.lines)


def _is_fatal(error: str) -> bool:
    return bool(_CONTENT.search(error) or _WHOLE.search(error))


class IgnoredErrors:
    """Counts the errors that kopia ignores, as it writes them; `first` is the first one about no attribute, or None."""

    def __init__(self) -> None:
        self.count = 0
        self.first: str | None = None
        self._fatal: str | None = None

    def take(self, line: str) -> None:
        """Take one line of kopia's output."""
        if not (found := _IGNORED.search(line)):
            return
        self.count += 1
        if _ATTRIBUTES not in found[1]:
            self.first = self.first or found[1]
        if _is_fatal(found[1]):
            self._fatal = self._fatal or found[1]

    def check(self, answer: KopiaAnswer) -> None:
        """Check that all of them are refusals of single entries.

        Raises:
            KopiaError: one is not; its class tells whether another attempt may succeed.
        """
        if self._fatal is not None:
            replace(answer, exit_code=1, lines=[self._fatal]).check()
