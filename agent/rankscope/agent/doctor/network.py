"""Checks of the way to a collector: address, connection, contract, token and clock."""

import socket
import time
from collections.abc import Iterator

from rankscope.agent.doctor.finding import Finding, fault, ok, warning
from rankscope.agent.errors import ConfigError
from rankscope.agent.hello import PROTOCOL_VERSION
from rankscope.agent.transport.channel import open_channel, read_secrets, why_not, with_token
from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.sender import load_grpc
from rankscope.v1 import collector_pb2 as pb

CLOCK_SECONDS = 1.0


def collector_at(
    address: str, timeout_seconds: float, config: TransportConfig
) -> Iterator[Finding]:
    """From the name to the answer; ends with the first step that fails."""
    if not address.startswith("unix:"):
        reached = _reach(address, timeout_seconds)
        yield reached
        if reached.level == "fault":
            return
    try:
        yield from _ask(address, timeout_seconds, config)
    except ConfigError as error:
        yield fault("access", str(error), "correct the setting, or make the file readable")


def _reach(address: str, timeout_seconds: float) -> Finding:
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            return ok("address", f"{address} is reached ({connection.getpeername()[0]})")
    except socket.gaierror as error:
        return fault(
            "address",
            f"{address}: the name {host} is not known here ({error.strerror})",
            "correct RANKSCOPE_COLLECTOR, or use the number of the host",
        )
    except ConnectionRefusedError:
        return fault(
            "address",
            f"{address}: nothing listens on this port",
            f"start it there: rankscope serve --listen 0.0.0.0:{port} --insecure --store FOLDER",
        )
    except OSError as error:
        return fault(
            "address",
            f"{address}: no connection within {timeout_seconds:g} s ({error})",
            "look for a firewall, a network policy or a wrong network between the hosts",
        )


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; brackets of an IPv6 host are taken off."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _ask(address: str, timeout_seconds: float, config: TransportConfig) -> Iterator[Finding]:
    grpc, stubs = load_grpc(lambda level, text: None)
    hello = with_token(config, pb.Hello(protocol_version=PROTOCOL_VERSION, probe=True))
    began = time.time()
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with open_channel(grpc, config, read_secrets(config), address, options) as channel:
            call = stubs.CollectorStub(channel).Collect(
                iter([pb.FromAgent(hello=hello)]), timeout=timeout_seconds
            )
            answer = next(iter(call), None)
    except grpc.RpcError as error:
        seen = f"{error.code().name}: {error.details()}"
        yield _no_answer(address, seen, timeout_seconds, config)
        return
    took = time.time() - began
    if answer is None or answer.WhichOneof("message") not in ("welcome", "problem"):
        yield _no_answer(address, "it said nothing", timeout_seconds, config)
    elif answer.HasField("problem"):
        yield _refused(address, answer.problem)
    else:
        yield _version(address, answer.welcome)
        if answer.welcome.time:
            yield clock(answer.welcome.time - (began + took / 2), took)


def _no_answer(address: str, seen: str, timeout_seconds: float, config: TransportConfig) -> Finding:
    why = why_not(config, address, timeout_seconds)
    if why.startswith("it speaks TLS"):
        return fault(
            "collector",
            f"{address} speaks TLS, and this agent does not",
            "name its port without TLS, or set tls_ca (RANKSCOPE_TLS_CA)",
        )
    return fault(
        "collector",
        f"{address} does not answer as a collector ({why or seen})",
        "look at the port, at proxies in between, and at the collector's log",
    )


def _refused(address: str, problem: pb.Problem) -> Finding:
    name = pb.Problem.Code.Name(problem.code)
    if "process_uuid" in problem.message:  # a probe has none; it is older than probes
        return warning("collector", f"{address} answers; it is too old to say more", "upgrade it")
    if problem.code == pb.Problem.OVERLOADED:
        return warning("collector", f"{address}: {problem.message}", "let it serve more streams")
    return fault("collector", f"{address} says {name}: {problem.message}", "do what it says")


def _version(address: str, welcome: pb.Welcome) -> Finding:
    seen = f"{address}: rankscope {welcome.collector_version}"
    if welcome.protocol_version < PROTOCOL_VERSION:
        return fault(
            "collector",
            f"{seen} speaks version {welcome.protocol_version} of the contract, this agent "
            f"version {PROTOCOL_VERSION}: it sends nothing there",
            "upgrade the collector",
        )
    return ok("collector", f"{seen} serves this agent")


def clock(difference_seconds: float, took_seconds: float) -> Finding:
    """How far the collector's clock is ahead, as well as the round trip lets it be known."""
    ahead = f"{abs(difference_seconds):.2f} s {'ahead' if difference_seconds > 0 else 'behind'}"
    seen = f"the collector's clock is {ahead} (± {took_seconds / 2:.2f} s)"
    if abs(difference_seconds) > CLOCK_SECONDS + took_seconds / 2:
        return warning(
            "clock",
            f"{seen}: the times of two hosts cannot be compared",
            "let NTP or chrony set both clocks; the order of records does not rest on them",
        )
    return ok("clock", seen)
