"""What running ahead and drafts do to an engine's tokens per second, in one process, round by round.

    python benches/serving_loop.py [--tokens 48] [--rounds 3]

The model is the demo's. Half of the answers are free, half repeat a text of the prompt, which is where prompt
lookup can help. Each way goes through the same requests in each round, in turn; the tokens must be the same
(or differ by a near tie of the model's logits, which is said). Tokens per second are those of the best round.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from kvfolio.cli.loading import find_source, load
from kvfolio.serving import Engine, EngineStats, PromptLookup, SamplingParams

LOOPS: dict[str, dict[str, Any]] = {
    "step by step": {},
    "run_ahead=1": {"run_ahead": 1},
    "run_ahead=2": {"run_ahead": 2},
    "prompt lookup": {"speculation": PromptLookup()},
}
NOTICE = (
    "The workshop mends poles, zips, straps and small tears. It gives an estimate before it starts, and "
    "needs about two weeks. Spare poles and pegs are sold singly."
)
QUESTIONS = [
    "Explain in two sentences why the sky is blue.",
    f"Repeat this text word by word:\n\n{NOTICE}",
    "Give me three tips for learning to read sheet music.",
    f"Copy the following notice exactly, and add nothing:\n\n{NOTICE}",
]


def serve(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_tokens: int, **options: Any
) -> tuple[float, EngineStats, list[list[int]]]:
    """Seconds, counters and answers, with an end of each answer that is not foreseen."""
    with Engine(model, num_blocks=200, max_sequences=4, tokenizer=tokenizer, **options) as engine:
        began = perf_counter()
        requests = [engine.submit(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
        engine.run()
        return perf_counter() - began, engine.stats(), [r.answers[0].token_ids for r in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model, tokenizer = load(find_source(None), dtype=torch.float32)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for question in QUESTIONS
    ]
    best: dict[str, float] = {}
    counted: dict[str, EngineStats] = {}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(arguments.rounds):
        for name, options in LOOPS.items():
            seconds, stats, answers[name] = serve(model, tokenizer, prompts, arguments.tokens, **options)
            best[name] = min(best.get(name, seconds), seconds)
            counted[name] = stats
    plain = counted["step by step"].output_tokens / best["step by step"]
    print(f"{torch.get_num_threads()} threads, {len(prompts)} requests, {arguments.rounds} rounds")
    print(
        f"{'':14}{'steps':>6}{'tokens':>8}{'a step':>8}{'wasted':>8}{'accepted':>16}{'tokens/s':>10}{'':>7}"
    )
    for name, stats in counted.items():
        drafts = f"{stats.accepted_tokens} of {stats.drafted_tokens}" if stats.drafted_tokens else "-"
        speed = stats.output_tokens / best[name]
        print(
            f"{name:14}{stats.steps:6}{stats.output_tokens:8}{stats.tokens_per_step:8.2f}"
            f"{stats.wasted_slots:8}{drafts:>16}{speed:10.2f}{speed / plain:6.2f}x"
            + ("" if answers[name] == answers["step by step"] else "  (answers differ)")
        )


if __name__ == "__main__":
    main()
