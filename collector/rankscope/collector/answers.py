"""Messages to agents, and the one rule about sequences."""

from collections.abc import Sequence

from rankscope.v1 import collector_pb2 as pb


def follows(accepted: int, sequence: int, message: pb.Batch) -> bool:
    """Whether a batch may come after the accepted ones: all in between are named as dropped."""
    if sequence == accepted + 1:
        return True
    reached = accepted
    for first, last in sorted((d.first_sequence, d.last_sequence) for d in message.drops):
        if first and first <= reached + 1:
            reached = max(reached, last)
    return accepted < sequence and reached >= sequence - 1


def ack(durable: int, refuses_tensors: bool = False) -> pb.FromCollector:
    """Everything up to here is stored."""
    return pb.FromCollector(ack=pb.Ack(durable_sequence=durable, refuses_tensors=refuses_tensors))


def farewell(run_path: str, folders: Sequence[str]) -> pb.FromCollector:
    """Everything of the process stands."""
    return pb.FromCollector(farewell=pb.Farewell(run_path=run_path, folders=folders))


def notice(level: str, text: str) -> pb.FromCollector:
    """One line for the user's log."""
    return pb.FromCollector(notice=pb.Notice(level=level, text=text))


def no_space(why: str, *, closes_stream: bool = False) -> pb.FromCollector:
    """Nothing can be stored for now."""
    text = f"the collector cannot store and acknowledges nothing until it can: {why}"
    return pb.FromCollector(
        problem=pb.Problem(
            code=pb.Problem.NO_SPACE,
            message=text,
            retry_after_seconds=5.0,
            closes_stream=closes_stream,
        )
    )


def refused(why: str) -> pb.FromCollector:
    """The process may not stream."""
    return pb.FromCollector(
        problem=pb.Problem(code=pb.Problem.REFUSED, message=why, closes_stream=True)
    )


def gap(accepted: int, sequence: int) -> pb.FromCollector:
    """A batch is missing; the stream ends."""
    text = f"batch {sequence} came after batch {accepted}"
    return pb.FromCollector(
        problem=pb.Problem(code=pb.Problem.SEQUENCE_GAP, message=text, closes_stream=True)
    )


def invalid(why: str, sequence: int = 0) -> pb.FromCollector:
    """A batch is refused and set aside; without a sequence it is the stream that is refused."""
    text = f"batch {sequence} is refused: {why}" if sequence else why
    return pb.FromCollector(
        problem=pb.Problem(
            code=pb.Problem.INVALID,
            message=text,
            refused_sequence=sequence,
            closes_stream=not sequence,
        )
    )


def overloaded(why: str) -> pb.FromCollector:
    """Come again later."""
    return pb.FromCollector(
        problem=pb.Problem(
            code=pb.Problem.OVERLOADED, message=why, retry_after_seconds=5.0, closes_stream=True
        )
    )


def failed(why: str) -> pb.FromCollector:
    """The collector itself has a fault."""
    return pb.FromCollector(
        problem=pb.Problem(
            code=pb.Problem.INTERNAL, message=why, retry_after_seconds=5.0, closes_stream=True
        )
    )
