"""Helm, and the values of the chart that mean the same as options of the installer."""

import json
import os
import subprocess
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from client.install.options import InstallOptions
from tests.support.tools import tool
from tests.testbed.api import Json
from tests.testbed.processes import BedError
from tools.chart import value_name

CHART = Path(__file__).parents[2] / "deploy" / "chart"


@dataclass(frozen=True)
class Helm:
    """One version of Helm, without the user's settings.

    Attributes:
        folder: Where it may write.
        binary: `helm` is version 3, `helm4` is 4.
        kubeconfig: The administrator's; without one only `template` works.
    """

    folder: Path
    binary: str = "helm"
    kubeconfig: Path | None = None

    def run(self, command: str, *arguments: str, values: Json | None = None) -> str:
        """Run a command with these values, and return what it printed."""
        argv = [str(tool("helm", self.binary)), command, *arguments]
        if values is not None:
            argv.append("--values=-")
        places = {f"HELM_{kind}_HOME": str(self.folder) for kind in ("CACHE", "CONFIG", "DATA")}
        env = {**os.environ, **places, "KUBECONFIG": str(self.kubeconfig or os.devnull)}
        text = json.dumps(values)
        done = subprocess.run(argv, input=text, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BedError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def template(self, namespace: str, values: Json) -> list[Json]:
        """Return the objects of a release."""
        text = self.run("template", "release", str(CHART), f"--namespace={namespace}", values=values)
        return [item for item in yaml.safe_load_all(text) if item]


def values_of(options: InstallOptions) -> Json:
    """Return all values of the chart for these options."""
    values: Json = _value(options)
    del values["namespace"]
    return values


def _value(option: object) -> Any:
    if is_dataclass(option) and not isinstance(option, type):
        members = {member: getattr(option, member.name) for member in fields(option)}
        # In a chart an absent text is an empty one.
        texts = {member: "" for member, value in members.items() if value is None and member.type == str | None}
        return {
            value_name(member.name): _value(value) for member, value in (members | texts).items() if value is not None
        }
    return list(option) if isinstance(option, tuple) else option
