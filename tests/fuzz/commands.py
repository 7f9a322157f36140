"""Command lines: every command with random options, names, paths and overrides, next to a folder of small runs."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socketserver
import sys
from pathlib import Path
from unittest import mock

import click
import typer

from fedkeep.cli import app
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.failure import TRACEBACK
from fedkeep.experiments.run import run
from fuzz._experiments import NAMES, VALUES
from fuzz.overrides import random_override

# the last overrides, so that no try takes long; method.* only as far as no hyperparameter costs time
SHORT = ["rounds=1", "epochs=1", "batch_size=100", "participation=2", "threads=1"]
PATHS = [
    "RUNS",
    "RUNS/a",
    "RUNS/b",
    "RUNS/nothing",
    "nothing",
    ".",
    "..",
    "/",
    "",
    "~nouser/x",
    "a/b/c",
    "r[/b]",
    "[bold]x",
]
PATHS += [
    "n" * 300,
    "n" * 255,
    "n" * 250,
    "a\nb",
    "\x1b[31m",
    "x.html",
    "x.csv",
    "x.parquet",
    "x.svg",
    "é",
    "$\\frac{$",
    "-",
]
PATHS += ["RUNS/a/rounds.jsonl", "RUNS/a/experiment.toml", "/proc/self/mem", "/proc/nothing/x", "/dev/full/x"]
NUMBERS = ["0", "-1", "1", "2", "3", "1.5", "x", "", "nan", "inf", "1e3", "9" * 30, "9" * 5000, str(2**31), str(2**63)]
SLOW = {"--jobs": ["0", "1", "x"], "--seeds": ["0", "1", "x"], "--rounds": ["0", "1", "2", "x"], "--every": NUMBERS[:8],
        "--steps": ["0", "2", "3", "x", "9" * 30], "--samples": ["0", "1", "5", "20", "x", "9" * 30],
        "--what": ["where", "divergence", "alignment,gradients", "losses", "tsne", "surface", "all ", "x"]}  # fmt: skip
SLOW_COMMANDS = ("demo", "methods", "plot", "analyse", "watch")  # they take seconds
WORDS = [
    *NAMES,
    "pdf",
    "png",
    "svg,pdf",
    "where,split",
    "a,b",
    ",",
    "all",
    "--",
    "-x",
    "--nope",
    "fedntd/table-1",
    "digits",
]


def try_one(seed: int, folder: Path) -> bool:
    rng = random.Random(seed)
    runs = folder.parent / "runs"
    if not runs.exists():
        _make_runs(runs)
    args = [arg.replace("RUNS", str(runs)) for arg in command_line(rng)]
    code, stderr = _call(args, folder)
    written = [path for path in folder.rglob(TRACEBACK) if path.is_file()]
    problem = stderr if "Traceback" in stderr else written[0].read_text() if written else None
    if code not in (0, 1, 2) or problem:
        raise AssertionError(f"{args!r} ended with {code}\n{problem or stderr}")
    return code == 0


def command_line(rng: random.Random) -> list[str]:
    """Return a random command line, without the program's name."""
    commands = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    names = [name for name in commands if name not in SLOW_COMMANDS or rng.random() < 0.1]
    name = rng.choice([*names, "run", "run", "partition"])
    command, args = commands[name], [name]
    if isinstance(command, click.Group):
        sub = rng.choice(list(command.commands))
        command, args = command.commands[sub], [name, sub]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and rng.random() < 0.35:
            option = rng.choice(parameter.opts)
            args += [option] if parameter.is_flag else [option, _value(rng, parameter.opts[0], parameter.type.name)]
    if name in ("run", "partition"):
        args += rng.choices(["digits", "x.toml", "RUNS/a/experiment.toml", *PATHS], k=rng.choice([0, 1, 1, 1, 1, 2]))
        args += [text for text in (random_override(rng) for _ in range(rng.choice([0, 0, 1]))) if "method." not in text]
        args += SHORT if name == "run" else []
    elif name == "reproduce":
        args += [rng.choice(["fedntd/table-1", "nothing", "x.toml", *PATHS]), "--show"]
        args += [random_override(rng) for _ in range(rng.choice([0, 0, 1]))]
    elif name == "demo":
        args += [] if "--rounds" in args else ["--rounds", "2"]
        args += [] if "--seeds" in args else ["--seeds", "1"]
    else:
        args += rng.choices([*PATHS[:4], *PATHS, *WORDS[-6:]], k=rng.choice([0, 1, 1, 1, 2]))
    return args


def _value(rng: random.Random, option: str, kind: str) -> str:
    if option in SLOW:
        return rng.choice(SLOW[option])
    if option == "--sweep":
        return f"{random_override(rng).replace('method.', 'x.')},{rng.choice(VALUES)}"[:2000]
    own = {"path": PATHS, "integer": NUMBERS, "float": NUMBERS, "integer range": NUMBERS}.get(kind, WORDS)
    return rng.choice(own if rng.random() < 0.8 else [*PATHS, *NUMBERS, *WORDS])


def _call(args: list[str], folder: Path) -> tuple[object, str]:
    """Run a command in this process and folder: its exit code and what it wrote to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["fedkeep", *args]),
        mock.patch.object(socketserver.BaseServer, "serve_forever", side_effect=KeyboardInterrupt),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            app.main()
        except SystemExit as end:
            return end.code or 0, err.getvalue()
    return None, err.getvalue()


def _make_runs(folder: Path) -> None:
    """Make two small runs."""
    os.environ["MPLBACKEND"] = "agg"
    for name, method in (("a", "fedavg"), ("b", "fedntd")):
        short = {"rounds": 2, "epochs": 1, "participation": 2, "batch_size": 100, "eval_local_every": 1}
        split = {"kind": "shards", "n_clients": 4, "s": 2}
        tables = {"method": method, "model": "mlp", "data": "digits", "split": split, "train": short}
        run(Experiment.from_dict(tables), folder / name)
