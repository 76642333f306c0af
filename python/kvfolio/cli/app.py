"""The commands and their options; what they do is in a module each, imported when it is asked for."""

from __future__ import annotations

from typing import Annotated

import typer

import kvfolio

app = typer.Typer(
    name="kvfolio",
    help="The memory manager of the KV cache for LLM serving.",
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
        typer.Option(help="A local folder, a GGUF file or a hub id; by default SmolLM2-135M-Instruct."),
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
