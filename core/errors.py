"""The errors of the project, one tree.

Knows the classes, whether trying again can help, and the exit codes of a data mover.
Does not know where an error is raised or how it is shown; API errors live in `core.kube.errors`.
"""

from typing import ClassVar

__all__ = [
    "AgentError",
    "CanceledError",
    "ConfigError",
    "ContractError",
    "DataPathError",
    "ExposeError",
    "KopiaError",
    "RepositoryError",
    "ResultError",
]


class AgentError(Exception):
    """Root of every error raised on purpose.

    `retry` says whether the same step may succeed later: the reconciler requeues such an
    error and ends the custom resource as Failed otherwise. `exit_code` is what a process
    ends with when the error reaches its top.
    """

    retry: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigError(AgentError):
    """The configuration, the command line or the environment cannot be used as it is."""

    exit_code = 2


class ContractError(AgentError):
    """An object or message of a peer does not have the form both sides agreed on."""


class ExposeError(AgentError):
    """A volume cannot be brought to a mover pod, and waiting will not change that."""


class DataPathError(AgentError):
    """The transfer of data failed."""

    exit_code = 10


class KopiaError(DataPathError):
    """kopia ended badly or said something that cannot be understood."""

    exit_code = 11


class RepositoryError(DataPathError):
    """The backup repository cannot be opened, created or used."""

    exit_code = 12


class ResultError(DataPathError):
    """A mover ended without a result that can be trusted."""

    exit_code = 13


class CanceledError(DataPathError):
    """The load was canceled on request."""

    exit_code = 14
