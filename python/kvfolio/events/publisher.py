"""Publishes a pool's events over ZeroMQ, in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import zmq

import kvfolio as kv
from kvfolio import _checks
from kvfolio._closing import Closing

from .wire import END, REQUEST_BYTES, SNAPSHOT


@dataclass
class PublisherStats:
    """Since the publisher was made."""

    batches: int = 0
    bytes: int = 0
    replays: int = 0  # requests that were answered by batches kept
    snapshots: int = 0  # requests that were answered by a snapshot
    bad_requests: int = 0


class Publisher(Closing):
    """Looks what has changed in a pool every `interval` seconds, and publishes it if anything has.

    `pool`: made with `events=True`; one publisher (or other source) at a time.
    `endpoint`: of the PUB socket. `bind`: whether to bind it or to connect it to a proxy; by default as vLLM
    decides, to bind what has a `*` or `::` in it, and ipc and inproc. `replay_endpoint`: of the ROUTER
    socket, which is bound. Port 0 is any free one; the attributes of the same names say which.
    `topic`: subscribers choose by its beginning. `buffer_steps`: how many batches are kept for replay.
    `hwm`: how many batches wait for a slow subscriber. The ones behind are dropped for him, and he sees it by
    the sequence numbers; nobody waits for him.
    `medium`, `data_parallel_rank`, `array_events`: see `BlockPool.events`.

    Events carry the token ids of prompts and answers: bind where only those who may know them can connect.

    Raises TypeError for another pool than a BlockPool (an engine has one, `engine.pool`), ConcurrentUse or
    ValueError from `BlockPool.events`, zmq.ZMQError if an endpoint cannot be had.
    """

    def __init__(
        self,
        pool: kv.BlockPool,
        *,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        bind: bool | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        interval: float = 0.01,
        medium: str = "GPU",
        data_parallel_rank: int = 0,
        array_events: bool = False,
    ) -> None:
        if not isinstance(pool, kv.BlockPool):
            own = ": publish its pool" if isinstance(getattr(pool, "pool", None), kv.BlockPool) else ""
            raise TypeError(f"pool must be a BlockPool, not {type(pool).__name__}{own}")
        buffer_steps = _checks.integer("buffer_steps", buffer_steps, 0)
        hwm = _checks.integer("hwm", hwm, 1)
        bind = _is_to_bind(endpoint) if bind is None else bind
        if not bind and endpoint.endswith(":0"):
            raise ValueError(
                f"endpoint must name the port to connect to, not {endpoint!r}: with bind=True port 0 is any "
                "free one"
            )
        if not 0 < interval < 3600:
            raise ValueError(f"interval must be above 0 and below 3600 seconds, not {interval}")
        self._interval = interval
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0
        self.stats = PublisherStats()
        self._source = pool.events(
            medium=medium, data_parallel_rank=data_parallel_rank, array_events=array_events
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(hwm)
            self._replay.set(zmq.SNDHWM, 2 * (buffer_steps + 1))
            self.endpoint = _attach(self._pub, endpoint, bind)
            self.replay_endpoint = replay_endpoint and _attach(self._replay, replay_endpoint, True)
        except BaseException:
            self._close_sockets()
            raise
        self._changed = threading.Condition()
        self._wanted = self._done = 0  # rounds: each looks at the pool once
        self._stops = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvfolio-events", daemon=True)
        self._thread.start()

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until all that had changed before the call is on its way.

        Raises TimeoutError, and RuntimeError if the publisher is closed or has failed.
        """
        with self._changed:
            goal = self._done + 2  # the round that runs now may have looked already
            self._wanted = max(self._wanted, goal)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._done >= goal or not self._thread.is_alive(), timeout):
                raise TimeoutError(f"nothing was published within {timeout} s")
            if self._done < goal:
                raise RuntimeError("the publisher is closed") from self._error

    def close(self) -> None:
        """Publish what has changed and stop. Idempotent."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stops:
                self._round()
                self._pause()
            self._round()
        except BaseException as error:  # said by the next flush
            self._error = error
            raise
        finally:
            del self._source  # another publisher may follow
            self._close_sockets()
            with self._changed:
                self._changed.notify_all()

    def _round(self) -> None:
        while self.replay_endpoint and self._replay.poll(0):
            self._answer(self._replay.recv_multipart())
        batch = self._source.drain()
        if batch is not None:
            self._pub.send_multipart([self._topic, _number(self._next), batch])
            self._kept.append((self._next, batch))
            self._next += 1
            self.stats.batches += 1
            self.stats.bytes += len(batch)
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._wanted > self._done or self._stops, self._interval):
                return

    def _answer(self, request: list[bytes]) -> None:
        """All from a batch on; or, if that is not kept any more, what is there, as the last batch left it."""
        if len(request) != 3 or len(request[2]) != REQUEST_BYTES:
            self.stats.bad_requests += 1
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        oldest = self._kept[0][0] if self._kept else self._next
        if self._next > 0 and (request[2] == SNAPSHOT or first < oldest):
            snapshot = self._source.snapshot()
            if snapshot is not None:
                self._send(client, self._topic, _number(self._next - 1), snapshot)
            self.stats.snapshots += 1
        else:
            for number, batch in self._kept:
                if number >= first:
                    self._send(client, self._topic, _number(number), batch)
            self.stats.replays += 1
        self._send(client, b"", END, b"")

    def _send(self, client: bytes, *frames: bytes) -> None:
        self._replay.send_multipart([client, b"", *frames])

    def _close_sockets(self) -> None:
        self._pub.close(linger=1000)
        self._replay.close(linger=1000)


def _number(number: int) -> bytes:
    return number.to_bytes(REQUEST_BYTES, "big")


def _is_to_bind(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(socket: zmq.Socket[bytes], endpoint: str, bind: bool) -> str:
    if not bind:
        socket.connect(endpoint)
        return endpoint
    socket.bind(endpoint)
    return socket.get_string(zmq.LAST_ENDPOINT)
