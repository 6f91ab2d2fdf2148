"""A TCP proxy whose faults are switched while connections are open."""

import contextlib
import socket
import struct
import threading
import time

_CHUNK = 64 << 10


class FaultProxy:
    """Listens on `address` and forwards to `target` ("host:port"), which may be changed.

    `delay_seconds` holds each chunk back; `bytes_per_second` throttles each direction; while
    `half_open` connections stay open and nothing passes, not even their end; `cut()` resets all.
    """

    def __init__(self, target):
        self.target = target
        self.delay_seconds = 0.0
        self.bytes_per_second = 0.0
        self.half_open = False
        self.refusing = False
        self.connections = 0
        self._pairs = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Reset every connection, as when a firewall forgets them."""
        for pair in list(self._pairs):
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()

    def close(self):
        self._closed = True
        self.half_open = False
        self._listener.close()
        self.cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while not self._closed:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client):
        host, _, port = self.target.rpartition(":")
        try:
            if self.refusing:
                raise ConnectionRefusedError
            server = socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._pairs.add((client, server))
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._hold(len(data))
                sink.sendall(data)
        self._hold(0)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        source.close()

    def _hold(self, size):
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if self.bytes_per_second:
            time.sleep(size / self.bytes_per_second)
        while self.half_open:
            time.sleep(0.01)
