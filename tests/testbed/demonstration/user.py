"""A user with kubectl: applies manifests, waits for conditions, runs a pod until it ends."""

import json
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import PODS
from tests.testbed.api import Api, Json
from tests.testbed.processes import LIMIT_SECONDS, BedError


@dataclass(frozen=True)
class User:
    """Does everything through kubectl, which must be on the path; reads through `api`."""

    api: Api

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        argv = ["kubectl", *arguments]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BedError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: Json) -> None:
        """Apply manifests, if there are any."""
        if not manifests:
            return
        body = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    def wait(self, target: str, condition: str, *, namespace: str, seconds: int = LIMIT_SECONDS) -> None:
        """Wait until a condition holds, such as `jsonpath={.status.phase}=Bound` or `delete`."""
        self.kubectl("wait", target, f"--for={condition}", "-n", namespace, f"--timeout={seconds}s")

    def run_pod(self, pod: Json) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self.apply(pod)
        ended = "jsonpath={.status.containerStatuses[0].state.terminated}"
        try:
            self.wait(f"pod/{name}", ended, namespace=namespace)
        except BedError as error:
            raise BedError(f"{error}\n{self.kubectl('describe', 'pod', name, '-n', namespace)}") from error
        found = self.api.get(PODS, namespace, name) or {}
        code = found["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
        if code:
            log = self.kubectl("logs", name, "-n", namespace, "--tail=20")
            raise BedError(f"pod {name} ended with {code}:\n{log}")
        self.kubectl("delete", "pod", name, "-n", namespace, "--wait=true")

    def metrics(self, namespace: str, selector: str, *, port: int) -> list[str]:
        """The lines that the pods of a selector serve under `/metrics`, without comments."""
        lines: list[str] = []
        for pod in self.api.objects(PODS, namespace, selector=selector):
            url = f"http://{pod['status']['podIP']}:{port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                lines += answer.read().decode().splitlines()
        return [line for line in lines if not line.startswith("#")]

    def apply_folders(self, *folders: Path, option: str) -> None:
        """Apply whole folders, with `-f` as they are or with `-k` by kustomize."""
        for folder in folders:
            self.kubectl("apply", option, str(folder))

    def names(self, kinds: Sequence[str], *options: str) -> list[str]:
        """The objects of some kinds, as kubectl names them; options choose among them."""
        return self.kubectl("get", ",".join(kinds), "-o", "name", *options).split()
