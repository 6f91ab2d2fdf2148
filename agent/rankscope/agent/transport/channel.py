"""How a collector is reached: plaintext or TLS, and the token that proves a right to be there.

Files are read for each new stream, so that they may be replaced while a job runs.
"""

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.agent.errors import ConfigError
from rankscope.agent.transport.config import TransportConfig
from rankscope.v1 import collector_pb2 as pb

if TYPE_CHECKING:
    import grpc

Secrets = tuple[bytes | None, bytes | None, bytes | None]

_ALERT_SECONDS = 0.5


class AccessError(ConfigError):
    """A file with a token, certificate or key cannot be used; names the setting and the file."""


def uses_tls(config: TransportConfig) -> bool:
    """Whether `tls_ca` or `tls_cert` is set, for a collector with an address: one that is started
    on this host listens on loopback."""
    return bool(config.collector) and (config.tls_ca or config.tls_cert) is not None


def read_secrets(config: TransportConfig) -> Secrets:
    """(CA, key, certificate) as they are now, None for what is not set; raises AccessError."""
    return (
        _read("tls_ca", config.tls_ca),
        _read("tls_key", config.tls_key),
        _read("tls_cert", config.tls_cert),
    )


def open_channel(
    library: Any, config: TransportConfig, secrets: Secrets, address: str, options: Any
) -> "grpc.Channel":
    """A channel to "host:port" or "unix:/path"; connects when it is used."""
    if not uses_tls(config):
        channel: grpc.Channel = library.insecure_channel(address, options=options)
        return channel
    credentials = library.ssl_channel_credentials(*secrets)
    channel = library.secure_channel(address, credentials, options=options)
    return channel


def with_token(config: TransportConfig, hello: pb.Hello) -> pb.Hello:
    """The Hello as it goes over the wire; what a spool keeps never has a token."""
    if config.token_file is None or not config.collector:
        return hello
    said = pb.Hello()
    said.CopyFrom(hello)
    text = (_read("token_file", config.token_file) or b"").decode(errors="replace").strip()
    if not text:
        raise AccessError(f"token_file: {config.token_file} is empty")
    said.token = text.splitlines()[0].strip()
    return said


def why_not(config: TransportConfig, address: str, timeout_seconds: float) -> str:
    """Why a collector that does not answer does not, as far as one connection tells; or "".

    Blocks, up to the timeout for each of two connections.
    """
    try:
        plain = _connect(address, timeout_seconds)
    except OSError as error:
        return str(error.strerror or error)
    with plain:
        if not uses_tls(config):
            return _speaks_tls(plain)
        return _handshake(config, plain, host_of(address))


def host_of(address: str) -> str:
    """The host of "host:port", without brackets; "localhost" for a Unix socket."""
    return "localhost" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise AccessError(f"{setting}: {path} cannot be read: {error.strerror}") from None


def _connect(address: str, timeout_seconds: float) -> socket.socket:
    if address.startswith("unix:"):
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(timeout_seconds)
        try:
            plain.connect(address.removeprefix("unix:"))
        except OSError:
            plain.close()
            raise
        return plain
    port = int(address.rpartition(":")[2])
    return socket.create_connection((host_of(address), port), timeout_seconds)


def _handshake(config: TransportConfig, plain: socket.socket, host: str) -> str:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        return f"the TLS files of this agent cannot be used: {_reason(error)}"
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host) as wrapped:
            wrapped.settimeout(_ALERT_SECONDS)
            if not _stays_open(wrapped):
                return "it does not accept this agent's certificate (tls_cert)"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        reason = _reason(error)
        if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
            return "it does not speak TLS, and this agent does (tls_ca, tls_cert)"
        if "CERTIFICATE" in reason.upper():
            return f"it does not accept this agent's certificate (tls_cert): {reason}"
        return f"no TLS connection: {reason}"
    except OSError as error:
        return f"it does not answer as a TLS server ({error.strerror or error})"
    return ""


def _stays_open(wrapped: ssl.SSLSocket) -> bool:
    """TLS 1.3: what it thinks of our certificate comes after the handshake."""
    try:
        return wrapped.recv(1) != b""
    except TimeoutError:
        return True
    except (ConnectionError, ssl.SSLEOFError):
        return False


def _speaks_tls(plain: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), context.wrap_socket(plain):
        return "it speaks TLS, and this agent does not: set tls_ca (RANKSCOPE_TLS_CA)"
    return ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
