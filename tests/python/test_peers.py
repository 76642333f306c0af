"""The managers that kvfolio is measured beside do the same work, and it is noticed if one does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kvfolio as kv
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))

from peers import plain_python, run, work
from peers.kvfolio_peer import Kvfolio
from peers.plain_peer import PlainPython
from peers.protocol import check, prompt

KINDS: list[Any] = [Kvfolio, PlainPython]


def test_plain_python_and_kvfolio_make_the_same_steps() -> None:
    """All arrays but the block ids themselves, while prompts with common heads come and go."""
    size, rows = 4, 6
    pool = kv.BlockPool(600, size)
    batch = kv.Batch(pool, max_sequences=rows, max_tokens_per_sequence=64)
    manager = plain_python.Manager(600, size, rows, 16)
    random = np.random.default_rng(7)
    documents = [random.integers(0, 99, 24).tolist() for _ in range(3)]
    running: list[tuple[kv.Sequence, int, plain_python.Sequence]] = []
    found = 0
    for step in range(150):
        if len(running) < rows and step % 3 != 2:
            document = documents[int(random.integers(3))]
            tokens = document[: int(random.integers(1, 25))] + random.integers(0, 99, 5).tolist()
            sequence, twin = pool.sequence(tokens), manager.admit(list(tokens))
            running.append((sequence, batch.add(sequence), twin))
            assert sequence.num_cached == twin.num_computed
            found += twin.num_computed
        if not running:
            continue
        plan = batch.plan(rows=[row for _, row, _ in running])
        expected = manager.plan([twin for _, _, twin in running])
        for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "logits_indices"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=name)
        assert plan.block_table.shape == expected.block_table.shape
        for arrays in (plan, expected):  # the slots are those of the positions, by each one's own table
            owners = np.repeat(np.arange(len(running)), np.diff(arrays.query_start_loc))
            cells = arrays.block_table[owners, arrays.positions // size].astype(np.int64)
            np.testing.assert_array_equal(arrays.slot_mapping, cells * size + arrays.positions % size)
        plan.commit()
        manager.commit(expected)
        tokens = random.integers(0, 99, len(running)).astype(np.int32)
        plan.extend(tokens)
        manager.extend(expected, tokens)
        if step % 4 == 1:
            sequence, _, twin = running.pop(0)
            sequence.free()
            manager.release(twin)
    assert found > 200
    pool.audit()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests of a conversation that goes on, and one of another."""
    rows = [
        {"input_length": 1000, "output_length": 9, "hash_ids": [1, 2]},
        {"input_length": 1024, "output_length": 300, "hash_ids": [7, 8]},
        {"input_length": 1500, "output_length": 100, "hash_ids": [1, 2, 3]},
        {"input_length": 2000, "output_length": 0, "hash_ids": [1, 2, 3, 4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_served_with_the_same_hits(trace: Path) -> None:
    assert [(len(tokens), answer) for tokens, answer in work.trace_prompts(trace, 9, 150)] == [
        (125, 1),
        (128, 32),
        (150, 12),
        (150, 1),
    ]
    rates, hits = work.churn(KINDS, trace, num_requests=4, num_blocks=2048, rounds=4)
    # 7 full blocks of 125 tokens are found again, then 11 of 187, of which the request has at most 249 - 1.
    total = 125 + 128 + 187 + 250
    assert hits == dict.fromkeys(("kvfolio", "plain Python"), (112 + 176) / total)
    assert all(rate > 0 for rate in rates.values())


def test_every_piece_of_work_runs_and_checks_itself() -> None:
    for figures in (
        *work.decode(KINDS, 3, 2, 2),
        *work.admissions(KINDS, 100, 2),
        work.forks(KINDS, 1, 2),
        work.truncations(KINDS, 1, 2),
        work.reorders(KINDS, 3, 2, 2),
    ):
        assert all(value > 0 for value in figures.values()) and "kvfolio" in figures


class Idle(PlainPython):
    """Does nothing in a step of all."""

    name = "idle"

    def step(self, handles: Any = None) -> None:
        if handles is not None:
            super().step(handles)


class Forgetful(PlainPython):
    """Has no cache."""

    name = "forgetful"

    def admit(self, prompt: list[int]) -> Any:
        self.manager.by_key.clear()
        return super().admit(prompt)


class Greedy(PlainPython):
    """Gives the same blocks to everybody."""

    name = "greedy"

    def step(self, handles: Any = None) -> None:
        super().step(handles)
        for sequence in self.manager.running[1:]:
            sequence.block_ids = self.manager.running[0].block_ids


@pytest.mark.parametrize(
    ("kind", "measure", "message"),
    [
        (Idle, lambda kinds: work.decode(kinds, 2, 1, 20), "blocks for|not in list|other blocks"),
        (Forgetful, lambda kinds: work.admissions(kinds, 100, 1), "found 0 tokens, not 96"),
    ],
)
def test_who_does_less_is_found_out(kind: Any, measure: Any, message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        measure([kind])


def test_a_block_in_two_tables_is_found_out() -> None:
    peer = Greedy(40, 16, 2, 64)
    handles = [peer.admit(peer.prompt(prompt(20, i))) for i in range(2)]
    peer.step()
    with pytest.raises(AssertionError, match=r"the table has other blocks|a block is in two tables"):
        check(peer, handles, [20, 20])


def test_the_table_gives_ratios_both_ways(tmp_path: Path) -> None:
    rows = [
        run.Row("step", {"kvfolio": 10.0, "plain Python": 250.0}),
        run.Row("rate", {"kvfolio": 100.0, "plain Python": 40.0}, "rate"),
        run.Row("fork", {"kvfolio": 5.0}),
        run.Row("hits", {"kvfolio": 0.5, "plain Python": 0.25}, "share"),
    ]
    lines = run.markdown(rows, KINDS).splitlines()
    assert lines[0] == "| | kvfolio | plain Python |"
    assert lines[2:] == [
        "| step | 10.0 | 250 (**25x**) |",
        "| rate | 100 | 40.0 (**2.5x**) |",
        "| fork | 5.00 | - |",
        "| hits | 50.0% | 25.0% |",
    ]
    page = tmp_path / "page.md"
    page.write_text(f"head\n{run.BEGIN}\nold\n{run.END}\ntail\n")
    run.replace_between_markers(page, "new")
    assert page.read_text() == f"head\n{run.BEGIN}\nnew\n{run.END}\ntail\n"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="must have the markers"):
        run.replace_between_markers(page, "new")
