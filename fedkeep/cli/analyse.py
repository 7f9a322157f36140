"""The command `fedkeep analyse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson
from fedkeep.errors import FedkeepError


def analyse(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")],
    what: Annotated[
        str,
        typer.Option(help="where, divergence, alignment, gradients, losses, tsne, surface, with commas; or all."),
    ] = "where,divergence,alignment,gradients,losses",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw what was found into this folder (extra plots).")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="pdf, png, svg: one or several, with commas.")] = "pdf,png",
    samples: Annotated[int, typer.Option(help="Test examples in a t-SNE.")] = 200,
    client: Annotated[int | None, typer.Option(help="Whose loss surface; else the cohort's first client.")] = None,
    steps: Annotated[int, typer.Option(help="Points of a loss surface, each way.")] = 15,
    span: Annotated[float, typer.Option(help="How far a loss surface reaches.")] = 1.0,
    directions: Annotated[str, typer.Option(help="Of a loss surface: hessian or random.")] = "hessian",
    as_json: AsJson = False,
) -> None:
    """Train the round after a run's checkpoint aside, and look where and why it forgets; the run stays as it is.

    Example: fedkeep analyse runs/digits --what where,divergence,tsne -o figures
    """
    from fedkeep._util.optional import require_extra
    from fedkeep.instruments.study import Options, analyse, parse_study_names
    from fedkeep.instruments.summary import sentences
    from fedkeep.plots.style import parse_formats

    names, options = parse_study_names(what), Options(samples, client, steps, span, directions)
    if output is not None:
        parse_formats(formats)
        require_extra("matplotlib", "plots", "plotting")
        if output.exists() and not output.is_dir():
            raise FedkeepError(f"{output} is a file, not a folder to draw into")
    found = analyse(folder, names, options)
    files = []
    if output is not None:
        from fedkeep.plots.instruments import draw

        files = draw(found, output, formats)
    if as_json:
        print(to_json({**found, "files": [str(file) for file in files]}, indent=2))
        return
    from rich.console import Console

    console = Console()
    for sentence in sentences(found):
        console.print(sentence, highlight=False, markup=False)
    for file in files:
        print(file)
