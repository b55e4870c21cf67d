#!/usr/bin/env python3
"""Pins the base images of the Dockerfiles to the digests that their tags have now.

    tools/digests.py [DOCKERFILE]

Without a name, of all of them. Asks the registry that a reference names, with an anonymous token. A file is written
only if every digest was read.
Source: https://distribution.github.io/distribution/spec/api/ and https://distribution.github.io/distribution/spec/auth/token/
"""

import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

_ARGUMENT = re.compile(
    r"^(?P<name>ARG \w+=)(?P<registry>[^\s/@]+)/(?P<repository>[^\s:@]+):(?P<tag>[^\s:@]+)"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?$",
    re.MULTILINE,
)

_HOSTS = {"docker.io": "registry-1.docker.io"}
"""Registries whose API has another name. Source: github.com/distribution/reference and containerd's docker resolver."""

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_TIMEOUT_SECONDS = 30
_LARGEST_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class _Tag:
    registry: str
    repository: str
    tag: str

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}:{self.tag}"

    def read_digest(self) -> str:
        """Return the digest of the index of all architectures.

        Raises:
            OSError, HTTPException: The registry did not answer, or with an error.
            ValueError: No registry sent the answer, or the image is of one architecture.
        """
        request = urllib.request.Request(f"{self._base}/v2/{self.repository}/manifests/{self.tag}")
        request.add_header("Accept", ", ".join(_INDEXES))
        try:
            return _read_manifest(request)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            challenge = error.headers.get("WWW-Authenticate", "")
        # Not passed on to where a redirection leads.
        request.add_unredirected_header("Authorization", f"Bearer {_read_token(challenge)}")
        return _read_manifest(request)

    @property
    def _base(self) -> str:
        # As in Docker, a registry on loopback needs no certificate.
        scheme = "http" if self.registry.startswith("127.") else "https"
        return f"{scheme}://{_HOSTS.get(self.registry, self.registry)}"


def main(arguments: list[str]) -> int:
    """Renew the digests of a Dockerfile, ours by default; returns the exit code."""
    return _renew(Path(arguments[0]) if arguments else Path(__file__).parents[1] / "Dockerfile")


def _renew(file: Path) -> int:
    text = file.read_text(encoding="utf-8")
    digests: dict[str, str] = {}
    for found in _ARGUMENT.finditer(text):
        tag = _Tag(found["registry"], found["repository"], found["tag"])
        try:
            digest = digests[str(tag)] = tag.read_digest()
        except (OSError, HTTPException, ValueError) as error:
            print(f"error: {tag}: {error}", file=sys.stderr)
            return 1
        change = "unchanged" if digest == found["digest"] else f"was {found['digest'] or 'without'}"
        print(f"{tag}: {digest}, {change}")
    pinned = _ARGUMENT.sub(lambda found: _pin(found, digests), text)
    if pinned != text:
        file.write_text(pinned, encoding="utf-8")
    return 0


def _pin(found: re.Match[str], digests: dict[str, str]) -> str:
    tag = f"{found['registry']}/{found['repository']}:{found['tag']}"
    return f"{found['name']}{tag}@{digests[tag]}"


def _read_manifest(request: urllib.request.Request) -> str:
    """Return the digest of the manifest that was sent, not what a header claims."""
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        kind = answer.headers.get_content_type()
        claimed = answer.headers.get("Docker-Content-Digest")
        body = answer.read(_LARGEST_MANIFEST_BYTES)
    if kind not in _INDEXES:
        raise ValueError(f"{kind} is the image of one architecture, not an index")
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if claimed not in {None, digest}:
        raise ValueError(f"the manifest's digest is not {claimed}, as the registry claims")
    return digest


def _read_token(challenge: str) -> str:
    """Get the token that a registry's challenge asks for."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not realm.startswith(("https://", "http://127.")):
        raise ValueError(f"the registry asks for {challenge or 'an unknown kind of'} authentication")
    url = f"{realm}?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        body = json.load(answer)
    token = body.get("token") or body.get("access_token") if isinstance(body, dict) else None
    if not isinstance(token, str):
        raise ValueError(f"{realm} sent no token")  # noqa: TRY004 - of an answer, not of an argument
    return token


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
