"""`kvfolio demo`: a dozen prompts, more answers than blocks, and an account of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

import kvfolio as kv
from kvfolio.serving import (
    Comparison,
    Engine,
    PromptLookup,
    Request,
    SamplingParams,
    compare_with_generate,
)

from .demo_prompts import PROMPTS, DemoPrompt
from .demo_report import make_report, show
from .loading import ModelNotFound, Source, find_source, load

SEED = 7
TEMPERATURE, TOP_P = 0.8, 0.95
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `kvfolio demo`, which see."""

    model: str | None
    json: bool
    max_tokens: int
    block_size: int
    num_blocks: int | None
    max_sequences: int
    max_tokens_per_step: int
    dtype: str
    verify: bool
    run_ahead: int = 0
    speculate: bool = False


def run_demo(options: DemoOptions) -> int:
    """Serve, show and compare; returns the exit status.

    It is 1 if there is no such model, if the options cannot be, or if a greedy answer is not the model's
    own, else 0.
    """
    console = Console(stderr=options.json)
    try:
        _check(options)
        source = find_source(options.model)
        with console.status(f"Loading {escape(str(source))} ..."):
            model, tokenizer = load(source, dtype=DTYPES[options.dtype])
        prompts = [_token_ids(tokenizer, prompt) for prompt in PROMPTS]
        engine = _make_engine(model, tokenizer, prompts, options)
        requests = [
            engine.submit(ids, _params(prompt, options)) for ids, prompt in zip(prompts, PROMPTS, strict=True)
        ]
    except ModelNotFound as error:
        console.print(f"[red]No model:[/] {escape(str(error))}")
        return 1
    except (kv.KVFolioError, ValueError, TypeError, MemoryError, OverflowError) as error:
        console.print(f"[red]It cannot be run so:[/] {escape(str(error))}")
        return 1
    _serve(engine, requests, console)
    engine.pool.audit()
    comparisons = _verify(model, requests, console) if options.verify else {}
    report = make_report(engine, requests, comparisons, model=_describe(model, source))
    if options.json:
        print(report.to_json())
    else:
        show(report, console)
    return 0 if all(comparison.agrees for comparison in comparisons.values()) else 1


def _check(options: DemoOptions) -> None:
    """What can be said before the model is there."""
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {options.dtype}")
    if options.max_sequences > options.max_tokens_per_step:
        raise ValueError(
            f"--max-tokens-per-step must be at least --max-sequences, which is {options.max_sequences}, "
            f"not {options.max_tokens_per_step}"
        )
    if options.speculate and options.run_ahead:
        raise ValueError(
            f"--run-ahead must be 0 with --speculate, not {options.run_ahead}: a draft goes on from the last "
            "token, which a step that runs ahead is planned without"
        )


def _token_ids(tokenizer: Any, prompt: DemoPrompt) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{prompt.system or ''}\n\n{prompt.question}\n".lstrip())["input_ids"])
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.question})
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _params(prompt: DemoPrompt, options: DemoOptions) -> SamplingParams:
    if prompt.samples == 1:
        return SamplingParams(max_tokens=options.max_tokens)
    return SamplingParams(
        max_tokens=options.max_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED, n=prompt.samples
    )


def _make_engine(
    model: PreTrainedModel, tokenizer: Any, prompts: list[list[int]], options: DemoOptions
) -> Engine:
    longest = max(map(len, prompts)) + options.max_tokens
    longest_blocks, _ = kv.block_layout(longest, options.block_size)
    # Room for the longest and a half: they share a system prompt, so several run at once, but soon not all
    # of them.
    num_blocks = options.num_blocks or longest_blocks * 3 // 2
    if num_blocks < longest_blocks:
        raise ValueError(
            f"--num-blocks must be at least {longest_blocks}, not {num_blocks}: so many take the longest "
            f"prompt and an answer of {options.max_tokens} tokens"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"--max-tokens must be at most {positions - longest + options.max_tokens}, not "
            f"{options.max_tokens}: with the longest prompt, more than that is longer than the model can read"
        )
    return Engine(
        model,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_sequences=options.max_sequences,
        max_tokens_per_step=options.max_tokens_per_step,
        max_tokens_per_sequence=longest,
        reserve_blocks=0,  # a careful engine would keep some free; this one is to show what happens
        tokenizer=tokenizer,
        run_ahead=options.run_ahead,
        speculation=PromptLookup() if options.speculate else None,
    )


def _serve(engine: Engine, requests: list[Request], console: Console) -> None:
    with Live(console=console, refresh_per_second=8) as live:
        while engine.has_work:
            engine.step()
            live.update(_picture(engine, requests, console))
    console.print()


def _picture(engine: Engine, requests: list[Request], console: Console) -> RenderableType:
    pool, stats = engine.pool, engine.stats()
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for answer in (answer for request in requests for answer in request.answers):
        style = "green" if answer.is_finished else "bold" if answer.token_ids else "dim"
        text = " ".join(answer.text.split()) or PROMPTS[answer.request.id].question
        shown = text if answer.is_finished else text[-max(20, console.width - 24) :]
        table.add_row(
            f"{answer.request.id}.{answer.index}", f"{len(answer.token_ids)} tok", Text(shown, style=style)
        )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        "blocks",
        ProgressBar(total=pool.num_blocks, completed=pool.num_referenced, width=40),
        f"{pool.num_referenced}/{pool.num_blocks} held",
        f"{stats.running} running, {stats.waiting} waiting, {stats.preemptions} preempted, "
        f"{stats.pool['copies']} copied",
    )
    return Group(table, bar)


def _verify(model: PreTrainedModel, requests: Iterable[Request], console: Console) -> dict[int, Comparison]:
    """Each greedy answer against the model's own, by request."""
    greedy = [request for request in requests if request.params.is_greedy]
    comparisons: dict[int, Comparison] = {}
    with console.status("") as status:
        for request in greedy:
            status.update(f"Comparing with generate: {len(comparisons)} of {len(greedy)}")
            comparisons[request.id] = compare_with_generate(
                model,
                request.prompt_token_ids,
                request.answers[0].token_ids,
                max_tokens=request.max_tokens,
            )
    return comparisons


def _describe(model: PreTrainedModel, source: Source) -> str:
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return f"{source} ({type(model).__name__}, {millions:.0f}M parameters)"
