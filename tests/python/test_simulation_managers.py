"""Managers side by side: small cases worked out by hand, slow models, and what always holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvfolio.simulation import MANAGERS, OPT_13B, CostModel, Setup, Workload, compare, make_workload
from kvfolio.simulation.buddy import BuddyAllocator
from kvfolio.simulation.contiguous import RESERVATIONS, ReservingManager
from simulation_helpers import A_SECOND_A_STEP, paging, run, shares, trace_of, workload_of

TWO, THREE = [(3, 3)] * 2, [(3, 3)] * 3


# The buddy allocator.


class SlowBuddies:
    """The same from a map of slots: of free regions, joined where they can be, the smallest, lowest one."""

    def __init__(self, num_slots: int) -> None:
        self.taken = np.zeros(num_slots, bool)
        self.sizes: dict[int, int] = {}

    def regions(self) -> list[tuple[int, int]]:
        found = []

        def split(start: int, size: int) -> None:
            if not self.taken[start : start + size].any():
                found.append((size, start))
            elif size > 1:
                split(start, size // 2)
                split(start + size // 2, size // 2)

        start = 0
        for order in reversed(range(20)):
            if len(self.taken) >> order & 1:
                split(start, 1 << order)
                start += 1 << order
        return found

    def allocate(self, num_slots: int) -> int | None:
        size = 1
        while size < num_slots:
            size *= 2
        fit = [region for region in self.regions() if region[0] >= size]
        if not fit:
            return None
        start = min(fit)[1]
        self.taken[start : start + size] = True
        self.sizes[start] = size
        return start

    def free(self, start: int) -> None:
        self.taken[start : start + self.sizes.pop(start)] = False


@pytest.mark.parametrize("num_slots", [0, 1, 7, 64, 100, 173])
def test_buddies_are_the_slow_ones(num_slots):
    random = np.random.default_rng(num_slots)
    fast, slow, starts, refusals = BuddyAllocator(num_slots), SlowBuddies(num_slots), [], 0
    for _ in range(400):
        if starts and random.random() < 0.45:
            start = starts.pop(int(random.integers(len(starts))))
            fast.free(start)
            slow.free(start)
        else:
            size = int(random.integers(1, max(num_slots // 3, 2)))
            start = fast.allocate(size)
            assert start == slow.allocate(size)
            refusals += start is None
            if start is not None:
                starts.append(start)
        assert fast.num_free == (~slow.taken).sum()
    assert refusals
    for start in starts:
        fast.free(start)
    assert fast.num_free == num_slots
    # All is joined again.
    largest = 1 << num_slots.bit_length() - 1 if num_slots else 0
    assert fast.largest == largest and (not largest or fast.allocate(largest) == 0)


def test_buddies_by_hand():
    """16 slots: 5 take 8, 3 take 4, and then 5 more find no room though 4 are left."""
    buddies = BuddyAllocator(16)
    assert [buddies.allocate(5), buddies.allocate(3), buddies.allocate(5), buddies.allocate(4)] == [
        0,
        8,
        None,
        12,
    ]
    buddies.free(8)
    buddies.free(0)
    assert [buddies.num_free, buddies.allocate(5)] == [12, 0]
    with pytest.raises(KeyError):
        buddies.free(8)
    with pytest.raises(ValueError, match="num_slots must be at least 1, not 0"):
        buddies.allocate(0)


# Reserving managers by hand.


def test_an_oracle_by_hand():
    """Each ends with 5 slots filled of 8: two in 16. A step fills 3, 1 and 1 of each."""
    outcome = run(workload_of(TWO), ReservingManager("reserve-oracle", workload_of(TWO), 16))
    assert (outcome.steps, outcome.finished, outcome.computed_tokens) == (3, 2, 10)
    assert (outcome.seconds, outcome.requests_per_second) == (3, pytest.approx(2 / 3))
    assert shares(outcome, 16, 3) == {
        "tokens": 6 + 8 + 10, "reserved": 4 + 2 + 0, "empty": 6 * 3, "cached": 0, "external": 0, "free": 0,
    }  # fmt: skip
    assert (outcome.mean_running, outcome.max_running, outcome.loaded_share) == (2, 2, 0)
    assert outcome.time_to_first_token.mean == outcome.time_per_output_token.mean == 1


def test_who_does_not_fit_waits_and_is_measured_from_its_arrival():
    workload = workload_of(THREE)
    outcome = run(workload, ReservingManager("reserve-oracle", workload, 16))
    assert (outcome.steps, outcome.seconds, outcome.loaded_share) == (6, 6, 0.5)
    assert outcome.time_to_first_token.max == 4 and outcome.time_to_first_token.p50 == 1
    assert outcome.time_per_output_token.max == 1
    assert outcome.mean_running == 2  # while somebody waited


@pytest.mark.parametrize(
    ("name", "size"),
    [("reserve-max", 40), ("reserve-pow2", 3 + 8), ("reserve-oracle", 3 + 5 - 1)],
)
def test_what_is_reserved(name, size):
    workload = workload_of([(3, 5), (30, 10)], max_length=40)
    manager = ReservingManager(name, workload, 128)
    assert manager.reservation(0) == size
    assert manager.reservation(1) == {"reserve-max": 40, "reserve-pow2": 40, "reserve-oracle": 39}[name]


def test_free_slots_in_pieces_are_external_fragmentation():
    """20 slots are 16 and 4: the first takes the 4, the next two 8 each, and the fourth wants 12, so 16.

    From step 2 on only the second is there, up to step 8: 12 slots are free, in two pieces.
    """
    lengths = [(4, 1), (1, 8), (5, 1), (9, 4)]
    workload = workload_of(lengths)
    outcome = run(workload, ReservingManager("reserve-oracle", workload, 20))
    assert (outcome.steps, outcome.loaded_share) == (12, pytest.approx(8 / 12))
    found = shares(outcome, 20, 8)
    assert (found["external"], found["free"]) == (7 * 12, 0)
    workload = workload_of([*lengths[:3], (10, 4)])  # 13 would not do in one piece, either
    found = shares(run(workload, ReservingManager("reserve-oracle", workload, 20)), 20, 8)
    assert (found["external"], found["free"]) == (0, 7 * 12)


def test_each_answer_has_its_own_copy_of_the_prompt():
    """Two answers of 5 each in 8: 3 tokens, then both hold the 3 and one more, then 5."""
    workload = workload_of([(3, 3)], samples=2)
    outcome = run(workload, ReservingManager("reserve-oracle", workload, 16))
    assert shares(outcome, 16, 3)["tokens"] == 6 + 8 + 10
    assert (outcome.computed_tokens, outcome.shared_share) == (3 + 2 + 2, 0)


def test_a_request_that_never_fits_is_refused_at_the_door():
    workload = workload_of([(3, 3), (9, 9), (3, 3)])
    manager = ReservingManager("reserve-oracle", workload, 24)  # 16 + 8: 17 need 32
    outcome = run(workload, manager)
    assert (outcome.finished, outcome.refused) == (2, 1)
    manager = ReservingManager("reserve-max", workload, 24)
    outcome = run(workload, manager)
    assert (outcome.finished, outcome.refused, outcome.steps) == (0, 3, 0)
    assert outcome.time_to_first_token is None and outcome.requests_per_second == 0


def test_a_request_of_any_length_costs_no_memory_of_its_own():
    """Nothing is made as long as what is refused."""
    workload = workload_of([(2**31 - 1, 2**31 - 1), (3, 3)])
    for manager in (paging(workload, 8, 2), ReservingManager("reserve-oracle", workload, 16)):
        outcome = run(workload, manager)
        assert (outcome.finished, outcome.refused) == (1, 1)


class SlowReserving:
    """The same by going through all sequences in each step, with the slow buddies."""

    def __init__(self, workload: Workload, reservation: Any, num_slots: int) -> None:
        self.workload, self.reservation, self.num_slots = workload, reservation, num_slots
        self.memory = SlowBuddies(num_slots)
        self.totals = dict.fromkeys(["steps", "computed", "kv", "tokens", "reserved", "empty", "free"], 0)

    def serve(self, max_sequences: int, max_tokens: int) -> dict[str, Any]:
        width, trace = self.workload.width, self.workload.trace
        waiting, running, first, last = list(range(trace.num_requests)), [], {}, {}
        while waiting or running:
            while waiting and (len(running) + 1) * width <= max_sequences:
                starts = []
                while (
                    len(starts) < width
                    and (start := self.memory.allocate(self.reservation(waiting[0]))) is not None
                ):
                    starts.append(start)
                if len(starts) < width:
                    for start in starts:
                        self.memory.free(start)
                    break
                running.append(
                    {"id": waiting.pop(0), "starts": starts, "prompt": 0, "out": 0, "held": [0] * width}
                )
            self.totals["steps"] += 1
            left, ended = max_tokens, []
            for one in running:
                prompt = int(trace.prompt_lengths[one["id"]])
                output = max(int(trace.output_lengths[one["id"]]), 1)
                if one["prompt"] == prompt:
                    for answer in range(width):
                        one["held"][answer] += 1
                        self.totals["kv"] += one["held"][answer]
                    left -= width
                    one["out"] += 1
                elif left > 0:
                    chunk = min(left, prompt - one["prompt"])
                    one["prompt"] += chunk
                    left -= chunk
                    one["held"][0] += chunk
                    self.totals["kv"] += one["prompt"]
                    if one["prompt"] == prompt:
                        one["held"] = [prompt] * width
                        one["out"] = 1
                        first[one["id"]] = self.totals["steps"]
                if one["out"] == output:
                    ended.append(one)
                    last[one["id"]] = self.totals["steps"]
            self.totals["computed"] += max_tokens - left
            held = sum(sum(one["held"]) for one in running)
            wanted = width * sum(self.workload.kv_length(one["id"]) for one in running)
            taken = int(self.memory.taken.sum())
            self.totals["tokens"] += held
            self.totals["reserved"] += wanted - held
            self.totals["empty"] += taken - wanted
            self.totals["free"] += self.num_slots - taken
            for one in ended:
                running.remove(one)
                for start in one["starts"]:
                    self.memory.free(start)
        return self.totals | {"first": first, "last": last}


@pytest.mark.parametrize("name", RESERVATIONS)
@pytest.mark.parametrize("width", [1, 3])
def test_reserving_is_the_slow_model(name, width):
    random = np.random.default_rng(width)
    lengths = [(int(random.integers(1, 40)), int(random.integers(0, 20))) for _ in range(40)]
    workload = workload_of(lengths, samples=width, max_length=64)
    num_slots, limits = 300, {"max_sequences": 9, "tokens_per_step": 16}
    manager = ReservingManager(name, workload, num_slots)
    slow = SlowReserving(workload, manager.reservation, num_slots).serve(*limits.values())
    cost = CostModel(step_time=1.0, token_time=0.0, kv_byte_time=0.0)
    outcome = run(workload, manager, cost=cost, **limits)
    assert (outcome.steps, outcome.computed_tokens) == (slow["steps"], slow["computed"])
    assert outcome.time_to_first_token.mean == pytest.approx(np.mean(list(slow["first"].values())))
    assert outcome.seconds == max(slow["last"].values())
    per_token = [
        (slow["last"][number] - slow["first"][number]) / (output - 1)
        for number, (_, output) in enumerate(lengths)
        if output > 1
    ]
    assert outcome.time_per_output_token.mean == pytest.approx(np.mean(per_token))
    # What is read, by its price.
    alone = run(
        workload, ReservingManager(name, workload, num_slots), cost=CostModel(1.0, 0.0, 1e-3), **limits
    )
    assert alone.seconds == pytest.approx(slow["steps"] + slow["kv"] * 1e-3)


# What always holds.

RANDOM = [
    pytest.param(seed, width, beams, id=f"{seed}-{width}{'-beams' if beams else ''}")
    for seed in range(4)
    for width, beams in ((1, False), (3, False), (3, True))
]


@pytest.mark.parametrize(("seed", "width", "beams"), RANDOM)
def test_conservation(seed, width, beams):
    """Shares sum up to 1, everybody ends, and every token is computed once, but for hits and who gave way."""
    random = np.random.default_rng(seed)
    num = 40
    lengths = [(int(random.integers(1, 60)), int(random.integers(0, 30))) for _ in range(num)]
    ids = [random.integers(0, 3, -(-prompt // 8)).tolist() for prompt, _ in lengths]
    trace = trace_of(
        lengths, ids, tokens_per_hash_id=8, arrivals=np.cumsum(random.exponential(3, num)).tolist()
    )
    workload = make_workload(trace, seed=seed, **{"beams" if beams else "samples": width})
    model = OPT_13B
    setup = Setup(
        model=model,
        cost=CostModel(1.0, 0.01, 1e-9),
        kv_memory=288 * width * model.kv_bytes_per_token,
        block_size=4,
        max_sequences=30,
        tokens_per_step=40,
    )
    outcomes = compare(workload, setup)
    assert [outcome.manager for outcome in outcomes] == list(MANAGERS)
    right = sum(prompt + width * (max(output, 1) - 1) for prompt, output in lengths)
    for outcome in outcomes:
        assert sum(outcome.memory.values()) == pytest.approx(1)
        assert all(share >= 0 for share in outcome.memory.values())
        assert (outcome.finished, outcome.refused) == (num, 0)
        assert 0 < outcome.mean_running <= outcome.max_running + 1e-9 <= 30 // width + 1e-9
        assert outcome.time_to_first_token.p50 >= 1
        times = [point.time for point in outcome.history]
        assert times == sorted(times)
        if outcome.manager in RESERVATIONS:
            assert outcome.computed_tokens == right and outcome.preemptions == 0
            assert outcome.memory["cached"] == outcome.shared_share == 0
        else:
            assert outcome.memory["external"] == 0
            assert 0 <= outcome.shared_share < 1
    plain, cached = outcomes[3], outcomes[4]
    assert plain.computed_tokens == right or plain.preemptions > 0
    assert plain.memory["cached"] == 0 and cached.memory["cached"] > 0
    assert 0 < cached.hit_rate < 1
    if width == 1:
        assert plain.memory["tokens"] > max(outcome.memory["tokens"] for outcome in outcomes[:3])
    assert plain.seconds < min(one.seconds for one in outcomes[:3])
    assert cached.computed_tokens < plain.computed_tokens


def test_a_run_can_be_had_again():
    workload = workload_of([(9, 30)] * 6, beams=3, rate=0.5, seed=4)
    found = [run(workload, paging(workload, 45, 2)) for _ in range(2)]
    assert found[0] == found[1]


# The workload, and the clock.


def test_arrivals():
    trace = trace_of([(1, 1)] * 3, arrivals=[5, 6, 8])
    assert make_workload(trace).arrivals.tolist() == [0, 1, 3]
    assert make_workload(trace_of([(1, 1)] * 3)).arrivals.tolist() == [0, 0, 0]
    many = make_workload(trace_of([(1, 1)] * 4000), rate=8.0).arrivals
    assert many[0] == 0 and (np.diff(many) >= 0).all() and many[-1] == pytest.approx(500, rel=0.05)


def test_the_clock_waits_for_nobody():
    """Between the two nobody runs: the second's time counts from its own arrival."""
    workload = make_workload(trace_of(TWO, arrivals=[0, 100.5]))
    outcome = run(workload, paging(workload, 9, 2))
    assert (outcome.seconds, outcome.steps) == (103.5, 6)
    assert outcome.time_to_first_token.max == 1
    assert outcome.requests_per_second == pytest.approx(2 / 103.5)


def test_longer_requests_are_left_out_for_all_alike():
    workload = make_workload(trace_of([(3, 3), (3, 6), (1, 1)], arrivals=[0, 1, 2]), max_length=6)
    assert (workload.num_requests, workload.refused, workload.arrivals.tolist()) == (2, 1, [0, 2])
    assert workload_of([(3, 3), (3, 6)]).max_length == 16


def test_the_cost_of_a_step():
    cost = CostModel(step_time=2.0, token_time=0.5, kv_byte_time=0.01)
    workload = workload_of([(3, 2)])
    # 3 tokens that read 3 x 10 bytes, then one that reads 4 x 10.
    outcome = run(workload, paging(workload, 4, 2), cost=cost, kv_bytes_per_token=10)
    assert outcome.time_to_first_token.mean == pytest.approx(2 + 1.5 + 0.3)
    assert outcome.time_per_output_token.mean == pytest.approx(2 + 0.5 + 0.4)


def test_histories_are_bounded():
    workload = workload_of([(3, 5000)])
    history = run(workload, ReservingManager("reserve-oracle", workload, 8192)).history
    assert 500 <= len(history) <= 1000
    assert (history[0].time, history[1].time - history[0].time, history[-1].time > 4900) == (0, 8, True)
    assert {point.running for point in history} == {1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"samples": 2, "beams": 2}, "only one of samples and beams may be above 1, not 2 and 2"),
    ({"samples": 0}, "samples must be at least 1, not 0"),
    ({"beam_turnover": 1.5}, "beam_turnover must be between 0 and 1, not 1.5"),
    ({"max_length": 5}, "max_length must let a request pass: none of the trace has at most 5 tokens"),
    ({"rate": 0.0}, "rate must be above 0"),
    ({"rate": float("nan")}, "rate must be above 0"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"samples": 2**30}, "samples or beams must be such"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_wrong_workload_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        workload_of([(3, 3)], **options)


SETUPS: list[tuple[dict[str, Any], str]] = [
    ({"kv_memory": 0}, "kv_memory must be at least 1"),
    (
        {"kv_memory": 800 * 1024 * 31},
        "kv_memory must be at least 26214400 bytes, the null block and one more",
    ),
    ({"block_size": 0}, "block_size must be at least 1"),
    ({"eviction": "best"}, "eviction must be one of lru"),
    ({"watermark": 1.0}, "watermark must be at least 0 and below 1"),
    ({"max_sequences": 300, "tokens_per_step": 299}, "tokens_per_step must be at least 300, not 299"),
]


@pytest.mark.parametrize(("options", "message"), SETUPS)
def test_a_wrong_setup_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Setup(**{"model": OPT_13B, "cost": A_SECOND_A_STEP, "kv_memory": 2**33} | options)


def test_wrong_managers_are_refused():
    setup = Setup(model=OPT_13B, cost=A_SECOND_A_STEP, kv_memory=2**33, max_sequences=2)
    with pytest.raises(ValueError, match=r"managers must be of reserve-max, .*, not 'best'"):
        compare(workload_of(TWO), setup, ["best"])
    with pytest.raises(ValueError, match=r"managers must not have paging\+cache: the trace has no hash ids"):
        compare(workload_of(TWO), setup, ["paging+cache"])
    with pytest.raises(ValueError, match="max_sequences must be at least 3, not 2"):
        compare(workload_of(TWO, samples=3), setup)
    assert [outcome.manager for outcome in compare(workload_of(TWO), setup)] == list(MANAGERS[:-1])
