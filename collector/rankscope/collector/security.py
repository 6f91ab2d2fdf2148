"""Who may come in: where a collector may listen, its certificates and its tokens.

Certificates and tokens are read again when their files change; what cannot be used is said in the
log and what was read before stays in force.
"""

import hashlib
import hmac
import ipaddress
import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SHORTEST_TOKEN = 16

Signature = tuple[tuple[int, int, int], ...]


class AccessError(ValueError):
    """An option of access cannot be granted: names it, its value and what is allowed."""


@dataclass(frozen=True)
class Access:
    """The options of `rankscope serve` that decide who may come in."""

    token_file: Path | None = None
    """A token on each line; a Hello must show one of them."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    """Clients must have a certificate that was signed with it."""
    insecure: bool = False
    """Plaintext may be spoken to other hosts."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise AccessError("--tls-cert and --tls-key: one without the other")
        if self.client_ca is not None and self.tls_cert is None:
            raise AccessError("--client-ca: needs --tls-cert and --tls-key")

    @property
    def uses_tls(self) -> bool:
        return self.tls_cert is not None

    def allow(self, option: str, address: str) -> None:
        """Raises AccessError when plaintext would leave this host unasked."""
        if self.uses_tls or self.insecure or stays_here(address):
            return
        raise AccessError(
            f"{option} {address}: other hosts can reach it and would speak in plaintext; give "
            "--tls-cert and --tls-key, or --insecure, or an address of this host only "
            "(127.0.0.1:PORT, unix:/PATH)"
        )


def stays_here(address: str) -> bool:
    """Whether only this host can reach "host:port" or "unix:/path"."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Tokens:
    """The tokens of a file, one a line; empty lines and lines that begin with # do not count."""

    def __init__(self, path: Path) -> None:
        """Raises AccessError when the file holds no usable token."""
        self._path = path
        self._seen = _signature(path)
        self._digests = self._read()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("--token-file: others than its owner can read %s", path)

    def admit(self, shown: str) -> bytes | None:
        """What is remembered of a token that is right, None for a wrong one; in constant time."""
        digest = _digest(shown)
        found = False
        for known in self._digests:
            found = hmac.compare_digest(known, digest) or found
        return digest if found else None

    def holds(self, digest: bytes) -> bool:
        """Whether a token that was right is so still."""
        return digest in self._digests

    def reload(self) -> bool:
        """Read the file again if it changed; whether the tokens are others now."""
        seen = _signature(self._path)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            digests = self._read()
        except AccessError as error:
            log.error("%s; the tokens of before stay in force", error)
            return False
        changed, self._digests = digests != self._digests, digests
        if changed:
            log.info("--token-file: the tokens in %s were changed", self._path)
        return changed

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"--token-file: {self._path} cannot be read: {error}") from None
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens or min(map(len, tokens)) < SHORTEST_TOKEN:
            raise AccessError(
                f"--token-file: {self._path} must hold a token of {SHORTEST_TOKEN} characters or "
                "more on each line"
            )
        return tuple(_digest(token) for token in tokens)


class Certificates:
    """The certificate, its key and whose clients are let in; for gRPC, which asks at handshakes."""

    def __init__(self, access: Access) -> None:
        """Raises AccessError when the files do not fit each other."""
        assert access.tls_cert is not None
        assert access.tls_key is not None
        self._access = access
        self._paths = [
            path for path in (access.tls_cert, access.tls_key, access.client_ca) if path is not None
        ]
        self._seen = _signature(*self._paths)
        self._configuration = self._read()

    def credentials(self) -> Any:
        """grpc.ServerCredentials that follow the files."""
        import grpc

        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed,
            require_client_authentication=self._access.client_ca is not None,
        )

    def _changed(self) -> Any:
        """Called by gRPC before each handshake: the new configuration, None while it is the old."""
        seen = _signature(*self._paths)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            self._configuration = self._read()
        except AccessError as error:
            log.error("%s; the certificate of before stays in force", error)
            return None
        log.info("--tls-cert: %s was read again", self._access.tls_cert)
        return self._configuration

    def _read(self) -> Any:
        import grpc

        access = self._access
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._paths[0], self._paths[1])  # says whether they fit
            if access.client_ca is not None:
                context.load_verify_locations(access.client_ca)
            cert, key, *roots = [path.read_bytes() for path in self._paths]
        except (OSError, ValueError) as error:
            names = ", ".join(map(str, self._paths))
            raise AccessError(f"--tls-cert, --tls-key, --client-ca: {names}: {error}") from None
        return grpc.ssl_server_certificate_configuration([(key, cert)], *roots)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _signature(*paths: Path) -> Signature:
    """Changes whenever a file does; a file that is gone counts as changed once."""
    seen = []
    for path in paths:
        try:
            status = path.stat()
            seen.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            seen.append((0, 0, 0))
    return tuple(seen)
