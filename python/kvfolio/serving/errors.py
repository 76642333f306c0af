"""What the serving loop can refuse."""

from __future__ import annotations

import kvfolio as kv


class UnsupportedModel(kv.KVFolioError, TypeError):
    """The model keeps something else than a K and a V of one shape per layer and token, or hides where."""


class RequestRefused(kv.KVFolioError, ValueError):
    """The request could never be finished by this engine, so it was not taken in."""
