"""The other end of a publisher: batches in their order, and what was missed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import zmq

from kvfolio._closing import Closing

from .wire import END, REQUEST_BYTES, SNAPSHOT, EventBatch, decode


class MissedEvents(Exception):
    """Batches were dropped on the way, and there is nobody to ask for them: what was told is not all."""


class Subscriber(Closing):
    """Receives the batches of one publisher, each once and in order.

    It begins with what is there (a snapshot) if there is a `replay_endpoint`, and asks there for what it
    missed: batches that the publisher's high-water mark dropped, or all of a connection that was down. What
    cannot be had one by one any more comes as a snapshot, a batch that begins with AllBlocksCleared.

    `topic`: only messages whose topic begins with it; one publisher's, since each counts for itself.
    `hwm`: how many batches are kept here while nobody receives. `replay_timeout`: how many seconds an answer
    of the `replay_endpoint` may take. `missed`: how many batches were not delivered by themselves. Belongs to
    one thread.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        hwm: int = 100_000,
        replay_timeout: float = 10.0,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = context.socket(zmq.SUB)
        self._sub.set_hwm(hwm)
        self._sub.subscribe(topic.encode())
        self._sub.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replay = context.socket(zmq.DEALER)
            self._replay.set_hwm(0)  # an answer is as long as it is
            self._replay.connect(replay_endpoint)
        self._replay_timeout = replay_timeout
        self._next = 0
        self._heard = -1  # the last number that came by itself
        self._told_at = 0.0  # of the last batch
        self._is_new = True
        self.missed = 0

    def close(self) -> None:
        """Idempotent."""
        self._sub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    def receive(self, timeout: float = 0.0) -> Iterator[tuple[int, EventBatch]]:
        """The batches that have come, with their numbers; waits up to `timeout` seconds for the first.

        Raises MissedEvents, once a gap, without a `replay_endpoint`; TimeoutError if nobody answers there.
        """
        if self._is_new:
            self._is_new = False
            if self._replay is not None:
                yield from self._catch_up(SNAPSHOT)
        while self._sub.poll(int(timeout * 1000)):
            timeout = 0.0
            _, frame, payload = self._sub.recv_multipart()
            number, batch = int.from_bytes(frame, "big"), decode(payload)
            # What a replay has brought already is not younger than that; else the publisher began anew.
            if number <= self._heard or (number < self._next and batch.ts > self._told_at):
                self._next = 0
            self._heard = number
            if number > self._next:
                expected = self._next
                self.missed += number - expected
                if self._replay is None:
                    yield self._take(number, batch)
                    raise MissedEvents(f"batches {expected} to {number - 1} were dropped on the way")
                yield from self._catch_up(expected.to_bytes(REQUEST_BYTES, "big"))
            if number == self._next:
                yield self._take(number, batch)

    def _take(self, number: int, batch: EventBatch) -> tuple[int, EventBatch]:
        self._next, self._told_at = number + 1, batch.ts
        return number, batch

    def _catch_up(self, request: bytes) -> Iterator[tuple[int, EventBatch]]:
        assert self._replay is not None
        self._replay.send_multipart([b"", request])
        until = time.monotonic() + self._replay_timeout
        while True:
            if not self._replay.poll(max(0, int(1000 * (until - time.monotonic())))):
                raise TimeoutError(f"the publisher did not answer within {self._replay_timeout} s")
            _, _, frame, payload = self._replay.recv_multipart()
            if frame == END:
                return
            number = int.from_bytes(frame, "big")
            if number >= self._next:
                yield self._take(number, decode(payload))
