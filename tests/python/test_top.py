"""`kvfolio top`, and the figures and the verdict of an engine that it watches."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import kvfolio as kv
import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

import tiny_models
from engine_helpers import make_engine
from event_router import Router
from kvfolio.cli.top import NoMetrics, View, fetch, metrics_url, parse
from kvfolio.metrics import serve
from kvfolio.serving import Binding, Engine, SamplingParams
from tiny_models import random_prompt
from transformers import PreTrainedModel

KVFOLIO = [sys.executable, "-c", "from kvfolio.cli import main; main()"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


def submit(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    for seed in range(count):
        engine.submit(
            random_prompt(length, seed=seed), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        )


def test_the_engine_says_what_binds(model: PreTrainedModel) -> None:
    space = make_engine(model, num_blocks=14, reserve_blocks=0)
    submit(space, 8, 13, 16)
    rows = make_engine(model, max_sequences=2)
    submit(rows, 8, 6, 8)
    budget = make_engine(model, max_tokens_per_step=4, num_blocks=200)
    submit(budget, 4, 40, 2)
    bandwidth = make_engine(model, memory_bandwidth=1.0)
    submit(bandwidth, 2, 6, 20)
    slow = make_engine(model, memory_bandwidth=1e15)
    submit(slow, 2, 6, 20)
    found = {}
    for name, engine in {
        "space": space,
        "rows": rows,
        "budget": budget,
        "bandwidth": bandwidth,
        "slow": slow,
    }.items():
        assert engine.stats().verdict.binding == Binding.IDLE
        while engine.has_work:
            engine.step()
        found[name] = engine.stats().verdict.binding
    assert found == {
        "space": Binding.MEMORY_SPACE,
        "rows": Binding.QUEUE,
        "budget": Binding.TOKEN_BUDGET,
        "bandwidth": Binding.MEMORY_BANDWIDTH,
        "slow": Binding.STEP_TIME,
    }
    assert space.stats().verdict.preemptions == space.stats().preemptions > 0


def test_a_step_is_bound_only_while_somebody_waits(model: PreTrainedModel) -> None:
    """Two of ten steps each, one after the other: the second one waits for the first."""
    engine = make_engine(model, max_sequences=1)
    submit(engine, 2, 6, 10)
    engine.run()
    load = engine.stats().load
    assert (load.steps, load.row_bound_steps, load.space_bound_steps, load.budget_bound_steps) == (
        20,
        10,
        0,
        0,
    )


def test_read_bytes_are_weights_and_the_keys_and_values_of_who_runs(model: PreTrainedModel) -> None:
    """Two steps: of a prompt of 6 tokens, and of one token behind it."""
    engine = make_engine(model)
    submit(engine, 1, 6, 2)
    engine.run()
    config = model.config
    heads = config.num_key_value_heads
    token = 2 * config.num_hidden_layers * heads * (config.hidden_size // config.num_attention_heads) * 4
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert engine.stats().load.read_bytes == 2 * weights + (6 + 7) * token


def test_times_are_counted_once_an_answer(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    requests = [
        engine.submit([1, 2, 3], SamplingParams(max_tokens=5, n=2, ignore_eos=True)) for _ in range(2)
    ]
    requests.append(engine.submit([1, 2, 3], SamplingParams(max_tokens=1)))
    engine.run()
    stats = engine.stats()
    first, each = stats.time_to_first_token, stats.time_per_output_token
    assert (sum(first.counts), sum(each.counts)) == (5, 4), "one answer has no second token"
    answers = [answer for request in requests for answer in request.answers]
    assert first.sum == pytest.approx(sum(a.first_token_at - a.request.submitted_at for a in answers))  # type: ignore[operator]
    assert each.sum == pytest.approx(sum(a.time_per_output_token or 0 for a in answers))
    assert stats.time_to_first_token is not engine.stats().time_to_first_token


def test_an_engine_has_events_if_it_is_asked_for_them(model: PreTrainedModel) -> None:
    engine, router = make_engine(model, events=True), Router()
    source = engine.pool.events()
    submit(engine, 3, 13, 8)
    engine.run()
    router.apply(source.drain())
    for seed in range(3):
        prompt = random_prompt(13, seed=seed)
        assert router.match(prompt, 4) == engine.pool.match(prompt) == 12
    with pytest.raises(ValueError, match="made with"):
        make_engine(model).pool.events()


def test_a_bandwidth_is_a_positive_number(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"memory_bandwidth must be above 0 bytes per second, not 0\.0"):
        make_engine(model, memory_bandwidth=0)
    with pytest.raises(TypeError, match="memory_bandwidth must be a number, not str"):
        make_engine(model, memory_bandwidth="fast")


@pytest.fixture
def busy(model: PreTrainedModel) -> Iterator[str]:
    """The URL of an engine at work in another thread: two rows, and more who wait."""
    engine, stop = make_engine(model, max_sequences=2, num_blocks=200), threading.Event()

    def work() -> None:
        while not stop.is_set():
            if len(engine._schedule.waiting) < 8:
                submit(engine, 4, 6, 20)
            engine.step()

    thread = threading.Thread(target=work)
    with serve(engine, port=0) as server:
        thread.start()
        yield server.url
        stop.set()
        thread.join()


def test_top_watches_another_process(busy: str) -> None:
    command = [
        *KVFOLIO,
        "top",
        busy.removesuffix("/metrics"),
        "--once",
        "--interval",
        "1",
    ]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "binds: queue - in " in text
    assert "of the steps all rows were taken" in text
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    view = json.loads(done.stdout)
    assert view["verdict"]["binding"] == "queue"
    assert view["verdict"]["queue_share"] > 0.5
    assert view["output_rate"] > 0
    assert view["time_to_first_token"] > 0
    assert (
        view["blank"] + view["idle"] + view["referenced"] + view["quarantined"] == view["num_blocks"] == 200
    )


def test_a_pool_alone_has_a_view_without_an_engine() -> None:
    pool = kv.BlockPool(10, 2)
    with serve(pool, port=0) as server:
        before = fetch(server.url)
        lent = pool.allocate(3)
        with pytest.raises(kv.OutOfBlocks):
            pool.allocate(9)
        time.sleep(0.05)
        now = fetch(server.url)
    view = View.between(before, now)
    assert (view.referenced, view.blank, view.verdict, view.output_rate) == (3, 7, None, None)
    assert view.refused_rate == pytest.approx(1 / (now.at - before.at))
    pool.release(lent)


def test_what_is_no_kvfolio_is_said() -> None:
    for url, message in (
        ("http://127.0.0.1:9/metrics", "gives no metrics: .*refused"),
        ("ftp://host", "url must be as http://host:port, not ftp://host"),
        ("http://", "url must be as http://host:port"),
    ):
        with pytest.raises(NoMetrics, match=message):
            fetch(metrics_url(url))
    with pytest.raises(NoMetrics, match="it is not kvfolio's"):
        parse("python_info 1.0\n", 0.0)
    assert metrics_url("host:9400") == metrics_url("http://host:9400/") == "http://host:9400/metrics"
    assert metrics_url("https://host/else") == "https://host/else"
    command = [*KVFOLIO, "top", "127.0.0.1:9", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "http://127.0.0.1:9/metrics gives no metrics" in done.stderr
