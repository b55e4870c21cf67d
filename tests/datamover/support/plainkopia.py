"""kopia by itself, as a user or Velero runs it: the other side of each interoperability test."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, BinaryIO, Final

PASSWORD: Final = "a secret password"
IDENTITY: Final = ("--override-hostname=default", "--override-username=default")
PORTABLE: Final = "--format-block-key-derivation-algorithm=pbkdf2-sha256-600000"
"""For a repository that programs with a released kopia open too, in half the time of its default."""


class PlainKopia:
    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KOPIA_PASSWORD": PASSWORD,
            "KOPIA_CONFIG_PATH": str(folder / "plain.config"),
            "KOPIA_CHECK_FOR_UPDATES": "false",
        }

    def run(self, *arguments: str, fails: bool = False, stdin: BinaryIO | None = None) -> bytes:
        flags = ("--no-auto-maintenance", "--disable-file-logging", "--no-persist-credentials", "--no-progress")
        done = subprocess.run(
            [self._program, *flags, *arguments], env=self._environment, stdin=stdin, capture_output=True, check=False
        )
        assert (done.returncode != 0) is fails, done.stderr.decode()
        return done.stdout

    def start(self, *arguments: str, fd: int) -> "subprocess.Popen[bytes]":
        """Start kopia with a pipe for its input, and a descriptor that it inherits."""
        flags = ("--disable-file-logging", "--no-progress")
        return subprocess.Popen(
            [self._program, *flags, *arguments],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
        )

    def connect(self, repository: Path) -> None:
        self.run("repository", "connect", "filesystem", f"--path={repository}", *IDENTITY)

    def snapshot(self, path: Path | str, *flags: str, source: str = "", stdin: BinaryIO | None = None) -> str:
        """Create a snapshot, of the path `source` if given, and return its ID."""
        named = [f"--override-source=default@default:{source}"] if source else []
        made = self.run("snapshot", "create", str(path), *named, *flags, "--json", stdin=stdin)
        return str(json.loads(made)["id"])

    def snapshots(self) -> list[dict[str, Any]]:
        """Return every snapshot, including incomplete ones."""
        found: list[dict[str, Any]] = json.loads(
            self.run("snapshot", "list", "--all", "--incomplete", "--json", "--show-identical") or b"[]"
        )
        return found

    def policy(self, source: str) -> dict[str, Any]:
        """Return the policy of this source without inherited settings."""
        defined = json.loads(self.run("policy", "list", "--json"))
        (found,) = [one for one in defined if one["target"]["path"] == source]
        return dict(found)
