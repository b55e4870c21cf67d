"""Certificates of one cluster, made with the `openssl` program.

Elliptic-curve keys: a certificate takes about 20 ms, so a cluster gets new ones on
every start. Knows nothing of what the certificates are for.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign,digitalSignature
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature,keyEncipherment
extendedKeyUsage = serverAuth,clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""

_VALID_DAYS = "7"


@dataclass(frozen=True)
class KeyPair:
    """Paths of a certificate and its private key, both PEM."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority of one cluster, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        """Make the authority's own key and certificate in `folder`, which is created."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._config = folder / "openssl.cnf"
        self._config.write_text(_CONFIG)
        self.pair = self._request("ca", subject="/CN=bed-ca", extensions="authority", more=[])

    def issue(self, name: str, *, user: str, group: str = "", addresses: tuple[str, ...] = ()) -> KeyPair:
        """A certificate for both ends of a connection.

        Args:
            user: The common name; Kubernetes takes it as the user.
            group: The organization; Kubernetes takes it as the group.
            addresses: Subject alternative names, such as `IP:10.96.0.1` or `DNS:localhost`.
        """
        subject = f"/O={group}/CN={user}" if group else f"/CN={user}"
        more = ["-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key)]
        if addresses:
            more += ["-addext", f"subjectAltName={','.join(addresses)}"]
        return self._request(name, subject=subject, extensions="leaf", more=more)

    def _request(self, name: str, *, subject: str, extensions: str, more: list[str]) -> KeyPair:
        pair = KeyPair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        argv = ["openssl", "req", "-x509", "-config", str(self._config), "-extensions", extensions]
        argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        argv += ["-days", _VALID_DAYS, "-subj", subject, *more]
        argv += ["-keyout", str(pair.key), "-out", str(pair.certificate)]
        subprocess.run(argv, check=True, capture_output=True)
        return pair
