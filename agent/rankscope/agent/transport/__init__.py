"""The way of a batch out of the training process: spool first, then one stream to a collector.

`Transport` is what the recording side uses. The modules in the order a batch meets them: `pump`
(the thread), `backlog` (take and spool), `spool`, `disk_spool`, `segment` (where it waits), then
`sender` and `stream` (gRPC). `embedded` finds or starts a collector, `leftovers` delivers spools
of dead processes, `signals` is for SIGTERM. No torch; gRPC is imported by `Transport.start`.
"""

from rankscope.agent.transport.config import TransportConfig
from rankscope.agent.transport.pump import Transport
from rankscope.agent.transport.results import BatchSource, CloseResult, TransportStats

__all__ = ["BatchSource", "CloseResult", "Transport", "TransportConfig", "TransportStats"]
