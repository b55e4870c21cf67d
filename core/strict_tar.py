"""The headers of a tar whose only end is its end marker: `tarfile` takes an invalid or missing header for the end.

Source: CPython 3.11, TarFile.next and TarInfo.fromtarfile in Lib/tarfile.py.
"""

import tarfile
from typing import Self


class StrictTarInfo(tarfile.TarInfo):
    """A member of a tar that is read; given to `tarfile.open` as `tarinfo`."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Return the next member.

        Raises:
            tarfile.HeaderError: the end marker is next.
            tarfile.ReadError: the next header is invalid, cut off or missing.
        """
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed lacks it
            raise
        except tarfile.HeaderError as e:
            raise tarfile.ReadError(f"{e} at byte {archive.offset}") from e
