"""A port where Prometheus, and `kvfolio top`, read the figures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from kvfolio import _checks
from kvfolio._closing import Closing

from .collector import Collector, Source


class MetricsServer(Closing):
    """What `serve` returns: `url` says where the figures are, `close` ends it."""

    def __init__(self, source: Source, port: int, address: str) -> None:
        registry = CollectorRegistry()
        registry.register(Collector(source))
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            text = f"{error.strerror} (address {address!r}, port {port}; port 0 is any free one)"
            raise type(error)(error.errno, text) from error
        self.address, self.port = address, int(self._server.server_port)

    def __repr__(self) -> str:
        return f"<MetricsServer: {self.url}>"

    @property
    def url(self) -> str:
        """Where the figures are."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(source: Source, *, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serve the figures of a pool or an engine over HTTP, from a thread of its own.

    `port`: 0 is any free one. `address`: of this machine, by default of itself alone; there is no password.
    Raises TypeError or ValueError for arguments that are none, OSError if the port cannot be had.
    """
    port = _checks.integer("port", port, 0)
    if port > 65535:
        raise ValueError(f"port must be at most 65535, not {port}")
    return MetricsServer(source, port, address)
