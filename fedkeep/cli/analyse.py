"""The command `fedkeep analyse`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import (
    AsJson,
    FitOnTest,
    PersonalData,
    Trust,
    TuneEpochs,
    confirm_code,
    require_fitted_study,
    require_writable_folder,
)


def analyse(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")],
    what: Annotated[
        str,
        typer.Option(
            help="Comma-separated: where, divergence, alignment, gradients, losses, probabilities, tsne, surface, "
            "training, confusion, neurons, circle, regions, recoverable, personal; or all."
        ),
    ] = "where,divergence,alignment,gradients,losses",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also plot the results into this folder (extra plots).")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="File formats, comma-separated: pdf, png, svg.")] = "pdf,png",
    samples: Annotated[int, typer.Option(help="Number of test examples in a t-SNE.")] = 200,
    client: Annotated[
        int | None, typer.Option(help="Client of surface and confusion (default: the cohort's first).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Points of the loss surface along each direction.")] = 15,
    span: Annotated[float, typer.Option(help="The loss surface goes from -SPAN to SPAN.")] = 1.0,
    directions: Annotated[str, typer.Option(help="Directions of the loss surface: hessian or random.")] = "hessian",
    fit_on_test: FitOnTest = False,
    tune_epochs: TuneEpochs = None,
    personal_data: PersonalData = "auto",
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Train one trial round from a checkpoint and report where and why classes are forgotten. Read-only.

    Example: fedkeep analyse runs/digits --what where,divergence,tsne -o figures
    """
    from fedkeep._util.optional import require_extra
    from fedkeep.analysis.recoverable import PUBLIC, STUDY
    from fedkeep.cli.progress import StepBar
    from fedkeep.instruments.options import Options
    from fedkeep.instruments.study import analyse, parse_study_names
    from fedkeep.instruments.summary import sentences
    from fedkeep.plots.style import parse_formats
    from fedkeep.runs.reading import load_run, read_experiment

    names = parse_study_names(what)
    if fit_on_test:
        require_fitted_study(names, "--what")
    options = Options(
        samples,
        client,
        steps,
        span,
        directions,
        tune_epochs=tune_epochs,
        personal_data=personal_data,
        fit_on_test=fit_on_test,
    )
    if output is not None:
        from fedkeep.plots.instruments import draw, require_plots

        parse_formats(formats)
        require_extra("matplotlib", "plots", "plotting")
        require_plots(names)
        require_writable_folder(output)
    confirm_code(read_experiment(folder), trust, ("model.name", "data.source"))
    files = []
    with StepBar(Console(stderr=True), 1 + len(names) + (output is not None)) as progress:
        analysis = analyse(folder, names, options, progress)
        history = load_run(folder, weights=False)
        if output is not None:
            progress("plots")
            files = draw(analysis, output, formats, history)
    if fit_on_test and analysis[STUDY]["fitted_on"] == PUBLIC:
        print("fedkeep: --fit-on-test had no effect: the bias was fitted on the run's public set", file=sys.stderr)
    if as_json:
        print(to_json({**analysis, "files": [str(file) for file in files]}, indent=2))
        return
    console = Console()
    for sentence in sentences(analysis, history):
        console.print(sentence, highlight=False, markup=False)
    for file in files:
        print(file)
