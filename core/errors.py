"""The base classes of the project's errors: whether a retry can help, and the exit code of a data mover.

Errors of the API server are in `core.kube.errors`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar


class AgentError(Exception):
    """Root of every error raised on purpose.

    `retry` is whether the same step may succeed later: the reconciler requeues after such an error and fails the
    transfer otherwise. `exit_code` is the exit code of a process that the error terminates.
    """

    retry: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigError(AgentError):
    """The configuration, the command line or the environment is invalid."""

    exit_code = 2


class ContractError(AgentError):
    """An object or message does not have the agreed format."""


class ExposeError(AgentError):
    """A volume can never be exposed in a mover pod."""


class DataPathError(AgentError):
    """The data path failed."""

    exit_code = 10


class KopiaError(DataPathError):
    """kopia failed, or its output is invalid."""

    exit_code = 11


class RepositoryError(DataPathError):
    """The backup repository cannot be opened, created or used."""

    exit_code = 12


class KopiaCrashError(KopiaError):
    """kopia was ended by a signal that this process did not send; another attempt may succeed."""

    exit_code = 15


class StorageOutageError(RepositoryError):
    """The storage did not answer for the stall timeout; another attempt may succeed."""

    exit_code = 16


class FencedError(DataPathError):
    """The data mover ended itself, because another one may write to its volume by now."""

    exit_code = 17


class IncompleteRestoreError(DataPathError):
    """The target of a restore refused some entries; all others are restored."""

    exit_code = 18


class UnsetAttributesError(DataPathError):
    """All data is restored, but the target did not take the owner, mode or time of some entries."""

    exit_code = 19


class ResultError(DataPathError):
    """A mover terminated without a valid result."""

    exit_code = 13


class CanceledError(DataPathError):
    """The transfer was canceled on request."""

    exit_code = 14


class Translated(AbstractContextManager["Translated"]):
    """Raises an error of its block as another one, whose text says before what was attempted, or what is wrong."""

    def __init__(
        self,
        errors: type[Exception] | tuple[type[Exception], ...],
        into: Callable[[str], Exception],
        about: str,
    ) -> None:
        """Translate these errors; `into` returns the new one with a text, which begins with `about`."""
        self._errors, self._into, self._about = errors, into, about

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, self._errors):
            why = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise self._into(f"{self._about}: {why}") from error
