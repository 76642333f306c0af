"""`kvfolio top`: a running engine, seen through its metrics."""

from __future__ import annotations

import http.client
import json as json_module
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvfolio.verdict import Load, Verdict, judge

Samples = dict[tuple[str, str], float]  # (name, value of the only label or "") -> value


class NoMetrics(Exception):
    """Nothing to show is there; the message says what came instead."""


@dataclass(frozen=True)
class Scrape:
    """One look at the metrics; `at` is of the clock of this process."""

    at: float
    samples: Samples

    def get(self, name: str, label: str = "") -> float:
        """A value. Raises NoMetrics if it is not there."""
        try:
            return self.samples[name, label]
        except KeyError:
            raise NoMetrics(f"there is no {name} among the metrics: it is not kvfolio's") from None

    @property
    def has_engine(self) -> bool:
        """Whether it is more than a pool."""
        return ("kvfolio_engine_steps_total", "") in self.samples

    @property
    def load(self) -> Load:
        """What a verdict is made of."""
        engine = "kvfolio_engine_"
        return Load(
            at=self.at,
            busy_time=self.get(engine + "busy_seconds_total"),
            space_bound_steps=int(self.get(engine + "bound_steps_total", "space")),
            row_bound_steps=int(self.get(engine + "bound_steps_total", "rows")),
            budget_bound_steps=int(self.get(engine + "bound_steps_total", "budget")),
            running=int(self.get(engine + "answers", "running")),
            waiting=int(self.get(engine + "answers", "waiting")),
            token_budget=int(self.get(engine + "token_budget_tokens")),
            memory_bandwidth=self.get(engine + "memory_bandwidth_bytes_per_second"),
            **{
                name: int(self.get(f"{engine}{name}_total"))
                for name in ("steps", "computed_tokens", "output_tokens", "preemptions", "read_bytes")
            },
        )


def parse(text: str, at: float) -> Scrape:
    """From Prometheus' text format."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvfolio_"):
                samples[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    scrape = Scrape(at, samples)
    scrape.get("kvfolio_pool_capacity_blocks")
    return scrape


def fetch(url: str) -> Scrape:
    """Raises NoMetrics if nobody answers, or nothing of ours."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        return parse(text, time.monotonic())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoMetrics(f"{url} gives no metrics: {reason}") from None


def metrics_url(url: str) -> str:
    """What `serve` calls `url`, from what people type."""
    if "://" not in url:
        url = f"http://{url}"
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NoMetrics(f"url must be as http://host:port, not {url}")
    return url if parts.path.strip("/") else urllib.parse.urljoin(url, "/metrics")


@dataclass(frozen=True)
class View:
    """What is shown: the pool now, and what happened between two looks. Rates are per second.

    `hit_share`: of the tokens that were allowed to be found, those that were. None where nothing happened, or
    there is no engine.
    """

    num_blocks: int
    blank: int
    idle: int
    referenced: int
    quarantined: int
    hit_share: float | None
    evicted_rate: float
    refused_rate: float
    output_rate: float | None
    computed_rate: float | None
    time_to_first_token: float | None  # means, seconds, of what ended in between
    time_per_output_token: float | None
    verdict: Verdict | None

    @classmethod
    def between(cls, before: Scrape, now: Scrape) -> View:
        """Of two looks, the second some time after the first."""
        seconds = max(now.at - before.at, 1e-9)

        def grown(name: str, label: str = "") -> float:
            return now.get(name, label) - before.get(name, label)

        def mean(name: str) -> float | None:
            count = grown(f"{name}_count")
            return grown(f"{name}_sum") / count if count else None

        pool, engine = "kvfolio_pool_", "kvfolio_engine_"
        queried = grown(pool + "cache_queried_tokens_total")
        reasons = ("pressure", "quarantined", "never_fits")
        return cls(
            num_blocks=int(now.get(pool + "capacity_blocks")),
            blank=int(now.get(pool + "blocks", "blank")),
            idle=int(now.get(pool + "blocks", "idle")),
            referenced=int(now.get(pool + "blocks", "referenced")),
            quarantined=int(now.get(pool + "blocks", "quarantined")),
            hit_share=grown(pool + "cache_hit_tokens_total") / queried if queried else None,
            evicted_rate=grown(pool + "evicted_blocks_total") / seconds,
            refused_rate=sum(grown(pool + "refused_allocations_total", each) for each in reasons) / seconds,
            output_rate=grown(engine + "output_tokens_total") / seconds if now.has_engine else None,
            computed_rate=grown(engine + "computed_tokens_total") / seconds if now.has_engine else None,
            time_to_first_token=mean(engine + "time_to_first_token_seconds") if now.has_engine else None,
            time_per_output_token=mean(engine + "time_per_output_token_seconds") if now.has_engine else None,
            verdict=judge(before.load, now.load) if now.has_engine else None,
        )


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def show(view: View, url: str) -> RenderableType:
    """The screen."""
    blocks = Table.grid(padding=(0, 2))
    for state in ("referenced", "quarantined", "idle", "blank"):
        number = getattr(view, state)
        blocks.add_row(
            state, f"{number:,}", f"{number / view.num_blocks:.0%}", Bar(view.num_blocks, 0, number, width=40)
        )
    rates = Table.grid(padding=(0, 2))
    rates.add_row(
        "output",
        _figure(view.output_rate, ",.0f", " tokens/s"),
        "first token",
        _milliseconds(view.time_to_first_token),
    )
    rates.add_row(
        "computed",
        _figure(view.computed_rate, ",.0f", " tokens/s"),
        "then each",
        _milliseconds(view.time_per_output_token),
    )
    rates.add_row(
        "evicted",
        _figure(view.evicted_rate, ",.1f", " blocks/s"),
        "cache hits",
        _figure(view.hit_share, ".0%", " of tokens"),
    )
    rates.add_row("refused", _figure(view.refused_rate, ",.1f", " calls/s"), "", "")
    parts: list[RenderableType] = [
        Text(f"{url}   {view.num_blocks:,} blocks", style="bold"),
        blocks,
        Text(),
        rates,
    ]
    verdict = view.verdict
    if verdict is not None:
        shares = Table.grid(padding=(0, 2))
        shares.add_row("answers", f"{verdict.running} running, {verdict.waiting} waiting")
        shares.add_row(
            "steps short of",
            f"blocks {verdict.space_share:.0%}, rows {verdict.queue_share:.0%}, "
            f"tokens {verdict.budget_share:.0%}",
        )
        shares.add_row(
            "a step",
            f"{verdict.tokens_per_step:.1f} tokens, {_milliseconds(verdict.time_per_step)}, "
            f"{verdict.read_rate / 1e9:.1f} GB/s read",
        )
        parts += [
            Text(),
            shares,
            Text(),
            Text.assemble("binds: ", (verdict.binding, "bold"), f" - {verdict.because}"),
        ]
    return Group(*parts)


def run_top(url: str, *, interval: float, once: bool, as_json: bool) -> int:
    """Look again and again until interrupted, or for one interval; returns the exit status."""
    try:
        url = metrics_url(url)
        before = fetch(url)
        if once:
            time.sleep(interval)
            view = View.between(before, fetch(url))
            if as_json:
                sys.stdout.write(json_module.dumps(asdict(view)) + "\n")
            else:
                Console().print(show(view, url))
            return 0
        with Live(Text("..."), console=Console(), refresh_per_second=4) as live:
            while True:
                time.sleep(interval)
                now = fetch(url)
                live.update(show(View.between(before, now), url), refresh=True)
                before = now
    except KeyboardInterrupt:
        return 0
    except NoMetrics as error:
        sys.stderr.write(f"{error}\n")
        return 1
