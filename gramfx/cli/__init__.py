"""The command line: ``gramfx`` or ``python -m gramfx``."""

from __future__ import annotations

from typing import Annotated

import typer

from gramfx import __version__
from gramfx.errors import GramfxError

main = typer.Typer(
    help="Gramians of Jacobians of any PyTorch model, by graph transformation.",
    epilog="Example: gramfx demo --epochs 2",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gramfx {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Gramians of Jacobians of any PyTorch model, by graph transformation."""


@main.command("demo", epilog="Example: gramfx demo --epochs 2 --samples 512 --seed 1")
def _demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 8,
    samples: Annotated[
        int, typer.Option(min=32, max=1536, help="Training images; the others are the test set.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order of the images.")] = 0,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Let Inductor compile the steps: minutes first, then faster.")
    ] = False,
) -> None:
    """Train a small network on handwritten digits by Jacobian descent, next to plain averaging.

    One objective per image. Jacobian descent takes the shortest average of their gradients, found from the Gramian.
    """
    from gramfx.cli.demo import run

    try:
        run(epochs, samples, seed, compile)
    except GramfxError as problem:
        typer.echo(f"gramfx: {problem}", err=True)
        raise typer.Exit(1) from problem
