"""Events over real sockets: the protocol, late and slow subscribers, replay, restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

import kvfolio as kv  # noqa: E402
from event_router import Router  # noqa: E402
from event_workload import Workload  # noqa: E402
from kvfolio.events import AllBlocksCleared, BlockStored, MissedEvents, Publisher, Subscriber  # noqa: E402

ANY = "tcp://127.0.0.1:0"
END = b"\xff" * 8


def compute(pool: kv.BlockPool, tokens: list[int]) -> None:
    """Computed, and idle then."""
    batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=len(tokens) + 1)
    batch.add(pool.sequence(tokens))
    with batch.plan():
        pass
    batch.remove(0).free()


def publisher(pool: kv.BlockPool, **options: object) -> Publisher:
    return Publisher(
        pool, **{"endpoint": ANY, "replay_endpoint": ANY, "bind": True, "interval": 0.002, **options}
    )  # type: ignore[arg-type]


@pytest.fixture
def socket() -> Iterator[object]:
    """Makes sockets as any other subscriber has them."""
    made = []

    def make(kind: int, endpoint: str) -> zmq.Socket:
        made.append(zmq.Context.instance().socket(kind))
        made[-1].set(zmq.RCVTIMEO, 5000)
        if kind == zmq.SUB:
            made[-1].subscribe(b"kv")
        made[-1].connect(endpoint)
        time.sleep(0.05)  # until the subscription has arrived
        return made[-1]

    yield make
    for one in made:
        one.close(linger=0)


def replay(socket: zmq.Socket, first: int) -> list[tuple[int, bytes]]:
    """As vLLM's subscribers ask."""
    socket.send_multipart([b"", first.to_bytes(8, "big", signed=first < 0)])
    answers = []
    while True:
        empty, topic, number, batch = socket.recv_multipart()
        assert empty == b""
        if number == END:
            assert (topic, batch) == (b"", b"")
            return answers
        assert topic == b"kv"
        answers.append((int.from_bytes(number, "big"), batch))


def test_a_subscriber_from_the_start_knows_what_can_be_found(socket) -> None:  # type: ignore[no-untyped-def]
    pool = kv.BlockPool(24, 2, events=True)
    with publisher(pool, topic="kv") as one:
        one.flush()  # the first batch says that it begins anew
        sub, router, work = socket(zmq.SUB, one.endpoint), Router(), Workload(pool, 5)
        numbers = []
        for _ in range(20):
            for _ in range(100):
                work.step()
            one.flush()
        work.close()
        one.flush()
        for expected in range(1, one.stats.batches):
            topic, number, batch = sub.recv_multipart()
            assert (topic, number) == (b"kv", expected.to_bytes(8, "big"))
            router.apply(batch)
            numbers.append(expected)
        assert len(numbers) > 15
        for text in work.texts:
            assert router.match(text, 2) == pool.match(text)
        assert router.num_removed > 20


def test_a_late_subscriber_replays_all_or_gets_what_is_there(socket) -> None:  # type: ignore[no-untyped-def]
    for buffer_steps in (100, 2, 0):
        pool = kv.BlockPool(24, 2, events=True)
        with publisher(pool, topic="kv", buffer_steps=buffer_steps) as one:
            dealer = socket(zmq.DEALER, one.replay_endpoint)
            one.flush()
            ((number, batch),) = replay(dealer, 0)
            assert (number, msgpack.unpackb(batch)[1]) == (0, [{"type": "AllBlocksCleared"}]), (
                "it begins anew"
            )
            for first in range(5):
                compute(pool, [first, 2, 3, 4, 5, 6])
                one.flush()
            pool.release(pool.allocate(20))
            one.flush()
            for request in (0, -1):
                router = Router()
                answers = replay(dealer, request)
                for _, batch in answers:
                    router.apply(batch)
                assert [router.match([first, 2, 3, 4, 5, 6], 2) for first in range(5)] == [
                    pool.match([first, 2, 3, 4, 5, 6]) for first in range(5)
                ]
                assert answers[-1][0] == 6, "it says up to where it is right"
                assert len(answers) == (7 if request == 0 and buffer_steps == 100 else 1)
            assert [number for number, _ in replay(dealer, 5)] == {100: [5, 6], 2: [5, 6], 0: [6]}[
                buffer_steps
            ]
            assert replay(dealer, 7) == []


def test_requests_that_are_none_are_passed_over(socket) -> None:  # type: ignore[no-untyped-def]
    pool = kv.BlockPool(8, 2, events=True)
    with publisher(pool, topic="kv") as one:
        compute(pool, [1, 2])
        dealer = socket(zmq.DEALER, one.replay_endpoint)
        for frames in ([b"x"], [b"", b"x"], [b"", b"x" * 9], [b"", b"x" * 8, b"y"]):
            dealer.send_multipart(frames)
        one.flush()
        assert len(replay(dealer, 0)) == one.stats.batches
        assert one.stats.bad_requests == 4


def large(pool: kv.BlockPool, first: int) -> list[int]:
    """Tokens whose events take most of a mebibyte, so that a few fill all buffers on the way."""
    return [first, *range(1 << 20, (1 << 20) + 150_000)]


def test_a_slow_subscriber_slows_nobody_learns_of_it_and_catches_up() -> None:
    pool = kv.BlockPool(4096, 1000, events=True)
    with publisher(pool, hwm=1, buffer_steps=3) as one:
        assert one.replay_endpoint
        with (
            Subscriber(one.endpoint, one.replay_endpoint, hwm=1) as slow,
            Subscriber(one.endpoint, hwm=1) as alone,
        ):
            for one_of_them in (slow, alone):
                assert all(batch.events == [AllBlocksCleared()] for _, batch in one_of_them.receive())
            time.sleep(0.05)
            texts = [large(pool, first) for first in range(25)]
            for text in texts:
                compute(pool, text)
                one.flush()
            assert one.stats.batches == 26, "nobody waited"
            seen: dict[int, bytes] = {}
            deadline = time.monotonic() + 10
            last = -1
            while last < 25 and time.monotonic() < deadline:
                compute(pool, [time.monotonic_ns() % (1 << 31)] * 1000)  # what comes late shows the gap
                one.flush()
                for number, batch in slow.receive(0.2):
                    assert number > last
                    last = number
                    for event in batch.events:
                        if isinstance(event, AllBlocksCleared):
                            seen.clear()
                        elif isinstance(event, BlockStored):
                            seen.update({event.token_ids[0]: event.block_hashes[0]})
            assert slow.missed > 0
            assert set(range(25)) <= set(seen), "all is known in the end"

            def go_on_alone() -> None:
                for first in range(100):
                    compute(pool, [first] * 1000)
                    one.flush()
                    for _ in alone.receive(0.2):
                        pass

            with pytest.raises(MissedEvents, match=r"batches \d+ to \d+ were dropped"):
                go_on_alone()
            assert alone.missed > 0


def again(make: Callable[[], Publisher]) -> Publisher:
    """ZeroMQ gives a port back a moment after its socket was closed."""
    for _ in range(100):
        try:
            return make()
        except zmq.ZMQError:
            time.sleep(0.05)
    return make()


def test_a_publisher_that_begins_anew_is_noticed() -> None:
    pool = kv.BlockPool(16, 2, events=True)
    with publisher(pool) as one:
        endpoint, replay_endpoint = one.endpoint, one.replay_endpoint
        subscriber = Subscriber(endpoint, replay_endpoint)
        for first in range(5):
            compute(pool, [first, 1])
            one.flush()
        received = list(subscriber.receive(1.0))
        assert received[-1][0] == one.stats.batches - 1
    with again(lambda: publisher(pool, endpoint=endpoint, replay_endpoint=replay_endpoint)) as two:
        stored: set[int] = set()
        deadline = time.monotonic() + 10
        while not stored and time.monotonic() < deadline:  # until it has connected again
            compute(pool, [9, 9])
            pool.reset_prefix_cache()
            for first in range(10, 14):
                compute(pool, [first, 1])
            two.flush()
            for _, batch in subscriber.receive(0.1):
                for event in batch.events:
                    if isinstance(event, AllBlocksCleared):
                        stored.clear()
                    elif isinstance(event, BlockStored):
                        stored.add(event.token_ids[0])
        assert stored == {10, 11, 12, 13}
    subscriber.close()


def test_a_new_publisher_is_noticed_by_who_knew_the_old_one_by_its_snapshot_alone() -> None:
    """What it then hears has smaller numbers than what it knows, as duplicates have, but is younger."""
    pool = kv.BlockPool(16, 2, events=True)
    with publisher(pool) as one:
        for first in range(150):
            compute(pool, [first, 1])
            one.flush()
        endpoint, replay_endpoint = one.endpoint, one.replay_endpoint
        subscriber = Subscriber(endpoint, replay_endpoint)
        assert [number for number, _ in subscriber.receive()] == [one.stats.batches - 1]
    heard: list[int] = []
    with again(lambda: publisher(pool, endpoint=endpoint, replay_endpoint=replay_endpoint)) as two:
        for first in range(200, 250):  # fewer than there were
            compute(pool, [first, 1])
            two.flush()
            heard += [number for number, _ in subscriber.receive(0.1)]
            if heard:
                break
    assert heard
    assert heard[0] < 100
    subscriber.close()


# The structs of vllm.distributed.kv_events, version 0.33, as far as they have no default.


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def test_what_publisher_and_vllm_agree_on_is_written_down() -> None:
    pool = kv.BlockPool(4, 2, events=True)
    source = pool.events()
    compute(pool, [1, 2, 3, 4])
    batch = source.drain()
    assert batch is not None
    decoded = msgspec.msgpack.decode(batch, type=Batch)
    assert abs(decoded.ts - time.time()) < 60
    assert msgspec.msgpack.encode(decoded) == batch, "byte for byte what msgspec makes of the same"


class Owner:
    """An engine, as far as a publisher is concerned."""

    def __init__(self, pool: kv.BlockPool) -> None:
        self.pool = pool


def test_publishers_say_what_is_wrong_with_them() -> None:
    pool = kv.BlockPool(4, 2, events=True)
    for options, message in (
        ({"buffer_steps": -1}, "buffer_steps must be at least 0, not -1"),
        ({"hwm": 0}, "hwm must be at least 1, not 0"),
        ({"interval": 0}, "interval must be above 0"),
        (
            {"bind": None},
            "endpoint must name the port to connect to, not 'tcp://127.0.0.1:0': with bind=True",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            publisher(pool, **options)
    with publisher(pool) as one:
        with pytest.raises(kv.ConcurrentUse, match=r"have a source already \(a publisher is one\)"):
            publisher(pool)
        with pytest.raises(zmq.ZMQError):
            publisher(kv.BlockPool(4, 2, events=True), endpoint=one.endpoint)
    with pytest.raises(TypeError, match="pool must be a BlockPool, not Owner: publish its pool"):
        publisher(Owner(pool))
    with pytest.raises(TypeError, match=r"pool must be a BlockPool, not list$"):
        publisher([])
    with pytest.raises(RuntimeError, match="the publisher is closed"):
        one.flush()
    one.close()
    publisher(pool).close()
