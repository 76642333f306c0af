"""The commands and their options; what they do is in a module each, imported when it is asked for."""

from __future__ import annotations

from typing import Annotated

import typer

import kvfolio

app = typer.Typer(
    name="kvfolio",
    help="The memory manager of the KV cache for LLM serving.",
    rich_markup_mode=None,  # rich cuts option names off where the terminal is narrow
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfolio {kvfolio.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="A local folder, a GGUF file or a Hugging Face id; by default SmolLM2-135M-Instruct."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Write the report to stdout as JSON, and what is shown to stderr.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 48,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the pool; by default so few that they run out.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=3, help="Answers computed at once.")] = 8,
    max_tokens_per_step: Annotated[int, typer.Option(min=3, help="Tokens computed at once.")] = 256,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="Of weights and cache.")
    ] = "float32",
    run_ahead: Annotated[int, typer.Option(min=0, help="Steps that are launched before the last ended.")] = 0,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Guess tokens by looking them up in prompt and answer.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare each greedy answer with the model's own `generate`.")
    ] = True,
) -> None:
    """Serve a dozen prompts from a pool that is too small, and show what that took.

    Exits with status 1 if a greedy answer differs from the model's own, and if it cannot be run.
    """
    try:
        from .demo import DemoOptions, run_demo
    except ImportError as error:
        typer.echo(f"The demo needs torch and transformers ({error}): pip install 'kvfolio[demo]'", err=True)
        raise typer.Exit(1) from None
    options = DemoOptions(
        model=model,
        json=json,
        max_tokens=max_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens_per_step,
        dtype=dtype,
        run_ahead=run_ahead,
        speculate=speculate,
        verify=verify,
    )
    raise typer.Exit(run_demo(options))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A folder with a config.json, such a file, or a Hugging Face id.")
    ],
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE[,SIZE...]", help="What each rank's device has, as 80GiB; or one a stage."),
    ] = None,
    utilization: Annotated[float, typer.Option(help="The share of --memory that may be used.")] = 0.9,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE...]", help="What each rank has for the KV alone, instead of --memory."
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens of a sequence.")
    ] = "1024,8192,32768",
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|float16|bfloat16|float8_e4m3fn|float8_e5m2|int8", help="By default the model's."
        ),
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(metavar="none|per-tensor|per-token-head", help="Of an 8-bit KV; by default per-tensor."),
    ] = None,
    alignment: Annotated[int, typer.Option(help="A block takes a multiple of so many bytes.")] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="Ranks a stage.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option("--pipeline-parallel", "--pp", help="Stages.")] = 1,
    layers_per_stage: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="By default as equal as can be.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of the whole model; by default the files' size, else an estimate."
        ),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a step, on each rank; by default an estimate.")
    ] = None,
    tokens_per_step: Annotated[int, typer.Option(help="For the estimate of the activations.")] = 2048,
    ignore_windows: Annotated[
        bool,
        typer.Option("--ignore-windows", help="All layers keep all tokens, as with one block table for all."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write the plan to stdout as JSON.")] = False,
) -> None:
    """Say how many sequences fit into some memory, and what the block size costs.

    Exits with status 1 if not one block fits, and if something is wrong with the configuration or an option.
    """
    from .plan import run_plan

    status = run_plan(
        model,
        lengths,
        as_json=json,
        sizes={
            "memory": memory,
            "kv_memory": kv_memory,
            "weights": weights,
            "activations": activations,
            "layers_per_stage": layers_per_stage,
        },
        utilization=utilization,
        block_size=block_size,
        kv_dtype=kv_dtype,
        scales=scales,
        alignment=alignment,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        tokens_per_step=tokens_per_step,
        ignore_windows=ignore_windows,
    )
    raise typer.Exit(status)


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A CSV of lengths, a JSONL with hash ids, a JSON of an agent's session or a folder of those."
        ),
    ],
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="azure|vidur|mooncake|agent-sessions",
            help="By default seen from the content.",
        ),
    ] = None,
    tokens_per_hash_id: Annotated[int, typer.Option(help="Of a mooncake trace.")] = 512,
    requests: Annotated[int | None, typer.Option(min=1, help="Take only the first so many.")] = None,
    capacities: Annotated[
        str | None,
        typer.Option(
            "--capacities",
            "--capacity",
            metavar="N[,N...]",
            help="Hit rates at so many blocks of one id each.",
        ),
    ] = None,
    managers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Of reserve-max, reserve-pow2, reserve-oracle, paging, paging+cache; by default all.",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the managers have for K and V; 12GiB by default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a config.json, such a file, or a Hugging Face id; by default OPT-13B."
        ),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="By default the model's.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block, of the paging managers.")] = 16,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longer requests are refused, and reserve-max reserves it; by default the model's limit."
        ),
    ] = None,
    max_sequences: Annotated[int, typer.Option(help="Sequences in the batch, at most.")] = 256,
    tokens_per_step: Annotated[int, typer.Option(help="Computed in a step, at most.")] = 2048,
    samples: Annotated[int, typer.Option(help="Answers to each request, by parallel sampling.")] = 1,
    beams: Annotated[int, typer.Option(help="Answers to each request, by beam search.")] = 1,
    beam_turnover: Annotated[
        float, typer.Option(help="How often, a step, a beam goes on from a drawn one of its request's.")
    ] = 0.3,
    eviction: Annotated[str, typer.Option(help="The policy of the prefix cache.")] = "lru",
    watermark: Annotated[
        float, typer.Option(help="The share of the blocks that paging keeps free at admission.")
    ] = 0.01,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, Poisson; by default the trace's times, else all at once."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and beams.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="a100-40gb|a100-80gb|h100|h200|l4", help="Whose nominal figures times follow from."
        ),
    ] = "a100-40gb",
    efficiency: Annotated[float, typer.Option(help="The part of them that is reached.")] = 0.6,
    step_time: Annotated[
        float | None, typer.Option(help="Seconds a step takes by itself; by default to read the weights.")
    ] = None,
    token_time: Annotated[
        float | None, typer.Option(help="Seconds a computed token takes; by default two operations a weight.")
    ] = None,
    kv_byte_time: Annotated[
        float | None, typer.Option(help="Seconds a byte of K and V takes to be read.")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE.png|FILE.svg", help="Draw it; needs kvfolio[plot]."),
    ] = None,
) -> None:
    """Replay a trace of requests: hit rates, and managers of the KV cache side by side in the same memory.

    Says what --capacities (hit rates) and --kv-memory or --managers (side by side) ask for; with none of
    them, hit rates of a trace with hash ids, else managers. Exits with status 2 for a trace or an option that
    is wrong.
    """
    from .simulate import SimulateOptions, run_simulate

    options = SimulateOptions(
        trace=trace,
        format=trace_format,
        tokens_per_hash_id=tokens_per_hash_id,
        requests=requests,
        capacities=capacities,
        managers=managers,
        kv_memory=kv_memory,
        model=model,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_length=max_length,
        max_sequences=max_sequences,
        tokens_per_step=tokens_per_step,
        samples=samples,
        beams=beams,
        beam_turnover=beam_turnover,
        eviction=eviction,
        watermark=watermark,
        rate=rate,
        seed=seed,
        device=device,
        efficiency=efficiency,
        step_time=step_time,
        token_time=token_time,
        kv_byte_time=kv_byte_time,
        json=json,
        plot=plot,
    )
    raise typer.Exit(run_simulate(options))


@app.command()
def bench(
    block_sizes: Annotated[
        bool, typer.Option("--block-sizes", help="Compare 1, 8, 16, 32, 64 and 128 tokens a block.")
    ] = False,
    trace: Annotated[
        str | None, typer.Option(help="As for simulate; by default synthetic lengths, which is said.")
    ] = None,
    trace_format: Annotated[
        str | None,
        typer.Option("--format", metavar="azure|vidur|mooncake|agent-sessions", help="As for simulate."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Of the decode step that is timed.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 1000,
    attention_sequences: Annotated[int, typer.Option(min=1, help="Of the attention that is timed.")] = 8,
    attention_length: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 4096,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="Of the attention that is timed.")
    ] = "float32",
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout.")
    ] = None,
) -> None:
    """Measure on this machine what the block size costs and brings.

    Exits with status 2 for a trace or an option that is wrong.
    """
    if not block_sizes:
        typer.echo("Say what to measure: --block-sizes", err=True)
        raise typer.Exit(2)
    from .bench import BenchOptions, run_bench

    options = BenchOptions(
        trace=trace,
        format=trace_format,
        sequences=sequences,
        length=length,
        attention_sequences=attention_sequences,
        attention_length=attention_length,
        dtype=dtype,
        json=json,
    )
    raise typer.Exit(run_bench(options))


@app.command()
def top(
    url: Annotated[
        str, typer.Argument(help="Where the figures are: http://host:port of kvfolio.metrics.serve.")
    ],
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show what happens within one interval, and exit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: write it to stdout as JSON.")] = False,
) -> None:
    """Watch a running engine, or a pool: what it does, and what binds now.

    Exits with status 1 if nobody answers at the URL, or somebody who has no metrics of kvfolio.
    """
    if json and not once:
        raise typer.BadParameter("--json needs --once")
    try:
        from .top import run_top
    except ImportError as error:
        typer.echo(f"top needs prometheus_client ({error}): pip install 'kvfolio[cli,metrics]'", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run_top(url, interval=interval, once=once, as_json=json))
