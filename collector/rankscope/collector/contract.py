"""Which agents are served: the version that a Hello names, and the answer to a probe.

A version is raised only when an older reader would misread a message; new fields do not raise it.
A collector serves its own version and older ones, so collectors are upgraded first.
"""

import time

from rankscope.v1 import collector_pb2 as pb

PROTOCOL_VERSION = 1
OLDEST_VERSION = 1


def refusal(hello: pb.Hello) -> str | None:
    """Why an agent of this version cannot be served, or None."""
    version = hello.protocol_version
    if OLDEST_VERSION <= version <= PROTOCOL_VERSION:
        return None
    served = " to ".join(dict.fromkeys((str(OLDEST_VERSION), str(PROTOCOL_VERSION))))
    upgrade = "collector" if version > PROTOCOL_VERSION else "agent"
    return (
        f"the agent ({hello.agent_version or 'of no version'}) speaks version {version} of the "
        f"contract, this collector version {served}: upgrade the {upgrade}"
    )


def who_answers(version: str, max_message_bytes: int) -> pb.FromCollector:
    """To a probe: what a Welcome says of the collector, and its clock."""
    return pb.FromCollector(
        welcome=pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            collector_version=version,
            max_message_bytes=max_message_bytes,
            time=time.time(),
        )
    )
