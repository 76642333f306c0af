"""Figures of a pool or an engine for Prometheus.

One call::

    server = kvfolio.metrics.serve(engine, port=9400)

They are read when somebody asks for them, from the counters that pool and engine keep anyway: reading costs a
step nothing. `docs/metrics.md` lists them.
"""

from __future__ import annotations

try:
    import prometheus_client as _prometheus_client  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("kvfolio.metrics needs prometheus_client: pip install 'kvfolio[metrics]'") from error

from .collector import Collector
from .server import MetricsServer, serve

__all__ = ["Collector", "MetricsServer", "serve"]
