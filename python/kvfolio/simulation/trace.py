"""A trace of requests: when they came, how long they were, and what their prompts had in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came.

    Attributes
    ----------
    source : str
        The file or folder.
    format : str
        One of `FORMATS`.
    digest : str
        SHA-256 of the file; of a folder, of its files' digests in the order of their names.
    arrivals : float64[n] or None
        Seconds since the first request; None where the trace does not tell.
    prompt_lengths, output_lengths : int64[n]
        Tokens.
    hash_ids : int32[m] or None
        What the prompts consist of, one request after the other: each id is the name of some tokens and of
        all that is before them. Numbered from 0 in no particular order. None where the trace does not tell.
    hash_id_starts : int64[n + 1]
        Where each request's ids begin, and where the last one's end.
    tokens_per_hash_id : int
        How many tokens an id stands for; 0 without ids.
    """

    source: str
    format: str
    digest: str
    arrivals: NDArray[np.float64] | None
    prompt_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    hash_ids: NDArray[np.int32] | None
    hash_id_starts: NDArray[np.int64]
    tokens_per_hash_id: int

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.prompt_lengths)

    @property
    def num_distinct(self) -> int:
        """How many different ids occur."""
        return 0 if self.hash_ids is None else len(np.unique(self.hash_ids))

    @property
    def most_hash_ids(self) -> int:
        """How many ids the request has that has most of them."""
        return int(np.diff(self.hash_id_starts).max(initial=0))

    def ids_of(self, request: int) -> NDArray[np.int32]:
        """The ids of one request; none where the trace does not tell."""
        if self.hash_ids is None:
            return np.empty(0, np.int32)
        return self.hash_ids[self.hash_id_starts[request] : self.hash_id_starts[request + 1]]

    def head(self, num_requests: int) -> Trace:
        """The first requests alone."""
        starts = self.hash_id_starts[: num_requests + 1]
        return replace(
            self,
            arrivals=None if self.arrivals is None else self.arrivals[:num_requests],
            prompt_lengths=self.prompt_lengths[:num_requests],
            output_lengths=self.output_lengths[:num_requests],
            hash_ids=None if self.hash_ids is None else self.hash_ids[: int(starts[-1])],
            hash_id_starts=starts,
        )

    def take(self, requests: NDArray[np.int64]) -> Trace:
        """Some of the requests, in the order given."""
        counts = np.diff(self.hash_id_starts)[requests]
        ids = None
        if self.hash_ids is not None:
            ids = np.concatenate([self.ids_of(int(request)) for request in requests])
        return replace(
            self,
            arrivals=None if self.arrivals is None else self.arrivals[requests],
            prompt_lengths=self.prompt_lengths[requests],
            output_lengths=self.output_lengths[requests],
            hash_ids=ids,
            hash_id_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )


class TraceBuilder:
    """Collects requests, compactly, since a trace may have millions."""

    def __init__(self) -> None:
        self.arrivals = array("d")
        self.prompts = array("q")
        self.outputs = array("q")
        self.ids = array("Q")
        self.starts = array("q", [0])

    def add(self, arrival: float | None, prompt: int, output: int, ids: Iterable[int] = ()) -> None:
        """Add a request. Either all have an arrival or none."""
        if arrival is not None:
            self.arrivals.append(arrival)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.ids.extend(ids)
        self.starts.append(len(self.ids))

    def build(self, source: str, trace_format: str, digest: str, tokens_per_hash_id: int = 0) -> Trace:
        """The trace. Ids are numbered anew, so that any of 64 bits become ones of 31."""
        arrivals = np.array(self.arrivals, np.float64)
        ids = None
        if tokens_per_hash_id:
            ids = np.unique(np.array(self.ids, np.uint64), return_inverse=True)[1].astype(np.int32)
        return Trace(
            source=source,
            format=trace_format,
            digest=digest,
            arrivals=arrivals - arrivals[0] if len(arrivals) else None,
            prompt_lengths=np.array(self.prompts, np.int64),
            output_lengths=np.array(self.outputs, np.int64),
            hash_ids=ids,
            hash_id_starts=np.array(self.starts, np.int64),
            tokens_per_hash_id=tokens_per_hash_id,
        )


def merge(source: str, traces: list[Trace], digest: str) -> Trace:
    """Several traces with ids of their own as one, side by side from the same time on."""
    first = traces[0]
    order = np.argsort(np.concatenate([_times(trace) for trace in traces]), kind="stable")
    places = [(trace, request) for trace in traces for request in range(trace.num_requests)]
    offsets = dict(zip(map(id, traces), np.cumsum([0, *(t.num_distinct for t in traces)]), strict=False))
    builder = TraceBuilder()
    for trace, request in (places[place] for place in order):
        ids = trace.ids_of(request).astype(np.uint64) + np.uint64(offsets[id(trace)])
        builder.add(
            float(_times(trace)[request]),
            int(trace.prompt_lengths[request]),
            int(trace.output_lengths[request]),
            ids.tolist(),
        )
    return builder.build(source, first.format, digest, first.tokens_per_hash_id)


def _times(trace: Trace) -> NDArray[np.float64]:
    return np.zeros(trace.num_requests) if trace.arrivals is None else trace.arrivals
