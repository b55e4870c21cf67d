"""The uploader's settings that a custom resource carries.

Knows their names, forms and defaults. Does not know where a resource keeps them.
Source: Velero v1.18, pkg/uploader/util/uploader_config.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from core.errors import ConfigError

__all__ = ["UploaderSettings", "parse_settings"]

_PARALLEL_UPLOAD: Final = "ParallelFilesUpload"
_PARALLEL_DOWNLOAD: Final = "ParallelFilesDownload"
_SPARSE: Final = "WriteSparseFiles"

_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False", ""), False),
}
"""Source: Go, strconv.ParseBool."""


@dataclass(frozen=True)
class UploaderSettings:
    """What a load asks for; None leaves the choice to the mover. `unknown` names the rest."""

    parallel_upload: int | None = None
    parallel_download: int | None = None
    write_sparse_files: bool = False
    unknown: tuple[str, ...] = ()


def parse_settings(settings: Mapping[str, str]) -> UploaderSettings:
    """Return what `settings` say.

    Raises:
        ConfigError: a known setting has a value it cannot have.
    """
    return UploaderSettings(
        parallel_upload=_count(settings, _PARALLEL_UPLOAD),
        parallel_download=_count(settings, _PARALLEL_DOWNLOAD),
        write_sparse_files=_boolean(settings, _SPARSE),
        unknown=tuple(sorted(settings.keys() - {_PARALLEL_UPLOAD, _PARALLEL_DOWNLOAD, _SPARSE})),
    )


def _count(settings: Mapping[str, str], name: str) -> int | None:
    """Return a number of files; 0 leaves the choice to the mover, as an absent one does."""
    text = settings.get(name, "0").strip()
    if not text.isdecimal():
        raise ConfigError(f"setting {name}: {text!r} is not a number of files such as 4")
    return int(text) or None


def _boolean(settings: Mapping[str, str], name: str) -> bool:
    text = settings.get(name, "false").strip()
    if text not in _BOOLEANS:
        raise ConfigError(f"setting {name}: {text!r} is neither true nor false")
    return _BOOLEANS[text]
