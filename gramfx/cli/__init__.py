"""The command line: ``gramfx`` or ``python -m gramfx``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gramfx import __version__
from gramfx.errors import GramfxError

main = typer.Typer(
    help="Gramians of Jacobians of any PyTorch model, by graph transformation.",
    epilog="Example: gramfx demo --epochs 2. Exit codes: 0 all is well; 1 what was checked is wrong; 2 the command "
    "could not be carried out.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


class Format(StrEnum):
    """What ``dump`` can write."""

    TEXT, JSON, DOT, SVG, HTML = "text", "json", "dot", "svg", "html"
    MODEL_EXPLORER = "model-explorer"


class Stage(StrEnum):
    """The stages of the compiler, in order."""

    CAPTURED, CANONICAL, SEPARATED, BATCHED = "captured", "canonical", "separated", "batched"
    JOINT, GRAMIAN, PLANNED, LOWERED = "joint", "gramian", "planned", "lowered"


class Shown(StrEnum):
    """What ``dump`` can show: a stage, or what Inductor makes of the last one."""

    CAPTURED, CANONICAL, SEPARATED, BATCHED = "captured", "canonical", "separated", "batched"
    JOINT, GRAMIAN, PLANNED, LOWERED = "joint", "gramian", "planned", "lowered"
    INDUCTOR = "inductor"


class Device(StrEnum):
    """What ``dump`` can compile for."""

    CPU, CUDA = "cpu", "cuda"


class Precision(StrEnum):
    """What ``check`` can compute in."""

    FLOAT64, FLOAT32 = "float64", "float32"


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:attribute or file.py:attribute: a module, or a class or function that makes one, with "
        "arguments as name(arg=literal).",
    ),
]
InputOption = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="SPEC",
        help="dtype[sizes], once for each input: f32[8,3,224,224], i64[8,16]<1000, mask=b8[8,16] for a keyword, "
        "f32[B=8,3,32,32] for a symbolic batch.",
    ),
]
TargetOption = Annotated[
    list[str],
    typer.Option("--target", "-t", metavar="SPEC", help="What the objective gets after the output, as --input."),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="TARGET",
        help="From the output to a tensor of objectives, as torch.nn:CrossEntropyLoss(reduction='none'); by default "
        "the output.",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--memory-budget", metavar="SIZE", help="Bytes above a plain forward and backward, as 512MiB."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
TracebackOption = Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")]


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


@main.command(
    "dump",
    epilog="Example: gramfx dump 'torch.nn:Linear(in_features=3, out_features=2)' --input 'f32[B=4,3]' --format html "
    "-o linear.html",
)
def _dump(
    target: Target,
    inputs: InputOption,
    targets: TargetOption = [],  # noqa: B006 - typer copies it
    objective: ObjectiveOption = None,
    stage: Annotated[
        Shown,
        typer.Option(help="The stage to show; of a page, the one it opens with. inductor: the source of all kernels."),
    ] = Shown.PLANNED,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Every stage.")] = False,
    format: Annotated[Format, typer.Option(help="How to show it.")] = Format.TEXT,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file; several pictures: a folder.")] = None,
    diff: Annotated[
        tuple[Stage, Stage] | None, typer.Option(metavar="S1 S2", help="Show as text what changed between two stages.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="What to compile for. The stage inductor needs triton for cuda, and no GPU.")
    ] = Device.CPU,
    memory_budget: BudgetOption = None,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show what became of a model at each stage of the compiler. Nothing is run."""
    from gramfx.cli.common import captured, carried_out
    from gramfx.cli.dump import Wanted, dump

    @carried_out(traceback)
    def run() -> None:
        wanted = Wanted(stage, all_stages, diff, device)
        place = wanted.place(format)
        step = captured(target, objective, inputs, targets, quiet, place, memory_budget=memory_budget)
        dump(step, target, wanted, format, output)

    run()


@main.command(
    "plan",
    epilog="Example: gramfx plan 'torch.nn:Linear(in_features=64, out_features=64)' --input 'f32[B=8,16,64]' "
    "--batch 2:512",
)
def _plan(
    target: Target,
    inputs: InputOption,
    targets: TargetOption = [],  # noqa: B006 - typer copies it
    objective: ObjectiveOption = None,
    memory_budget: BudgetOption = None,
    batch: Annotated[str | None, typer.Option(metavar="FIRST:LAST", help="All these batch sizes, from 2 on.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and peak bytes against batch size (matplotlib).")] = None,
    json: Annotated[bool, typer.Option("--json", help="As gramfx.Plan.from_json reads it.")] = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show how each parameter's part of the Gramian is contracted, and what that is predicted to cost."""
    from gramfx.cli.common import carried_out
    from gramfx.cli.plan import plan

    @carried_out(traceback)
    def run() -> None:
        plan(target, objective, inputs, targets, memory_budget, batch, plot, json, quiet)

    run()


@main.command(
    "check",
    epilog="Example: gramfx check 'torch.nn:Linear(in_features=3, out_features=2)' --input 'f32[4,3]' --samples 4",
)
def _check(
    target: Target,
    inputs: InputOption,
    targets: TargetOption = [],  # noqa: B006 - typer copies it
    objective: ObjectiveOption = None,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.FLOAT64,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Look at so many objectives; each costs a backward pass. All by default.")
    ] = None,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Compare a model's Gramian and gradient with autograd's, parameter by parameter."""
    import torch

    from gramfx.cli.check import check
    from gramfx.cli.common import MISMATCH, carried_out
    from gramfx.cli.spec import read_inputs

    @carried_out(traceback)
    def run() -> None:
        report = check(target, objective, read_inputs(inputs, targets), getattr(torch, dtype), samples, quiet)
        typer.echo(str(report))
        if not report.exact:
            typer.echo("gramfx: the Gramian or the gradient is off", err=True)
            raise typer.Exit(MISMATCH)

    run()


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
