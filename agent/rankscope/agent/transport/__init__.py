"""The way of a batch out of the training process: spool first, then one stream to a collector.

`Transport` is what the recording side uses; the modules, in the order a batch meets them: `pump`
(the thread), `backlog` (take and spool), `spool` and `segment` (what lies on disk), `sender` and
`stream` (gRPC), `embedded` (finds or starts a collector), `leftovers` (spools of dead processes),
`signals` (SIGTERM). No torch in here; gRPC is imported when a stream is opened.
"""

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.pump import Transport
from rankscope.agent.transport.results import BatchSource, CloseResult, TransportStats

__all__ = ["BatchSource", "CloseResult", "Transport", "TransportConfig", "TransportStats"]
