"""What a start of the command line imports: help, errors and completion need neither torch nor numpy nor pydantic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import typer.main

from fedkeep.cli import completion
from fedkeep.cli.app import app

LARGE = ("torch", "numpy", "pydantic", "scipy", "sklearn", "fedkeep.engine", "fedkeep.runs", "fedkeep.data")
# runs the command line and prints, after everything else, which modules were imported
PROBE = """
import json, sys
from fedkeep.cli import main
sys.argv = ["fedkeep", *sys.argv[1:]]
try:
    main()
finally:
    print()
    print(json.dumps(sorted(sys.modules)))
"""
COMMANDS = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def output_and_imports(*args: str, **environment: str) -> tuple[str, set[str]]:
    """Run `fedkeep ARGS`; return what it printed and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | environment,
    )
    *shown, modules = done.stdout.splitlines()
    return "\n".join(shown) + done.stderr, set(json.loads(modules))


def assert_small(modules: set[str]) -> None:
    assert "fedkeep.cli.app" in modules
    assert modules.isdisjoint(LARGE), sorted(modules.intersection(LARGE))


def test_the_help_text_needs_nothing_large() -> None:
    shown, modules = output_and_imports("--help")
    assert all(name in shown for name in COMMANDS)
    assert_small(modules)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_text_of_a_command_needs_nothing_large(command: str) -> None:
    shown, modules = output_and_imports(command, "--help")
    assert f"Usage: fedkeep {command}" in shown
    assert_small(modules)


def test_a_misspelt_command_needs_nothing_large() -> None:
    shown, modules = output_and_imports("rnu")
    assert "unknown command 'rnu': did you mean run?" in shown
    assert_small(modules)


def test_completion_needs_nothing_large() -> None:
    shown, modules = output_and_imports(
        _FEDKEEP_COMPLETE="complete_bash", COMP_WORDS="fedkeep re", COMP_CWORD="1"
    )  # as the shell asks
    assert all(name in shown for name in ("resume", "report", "reproduce"))
    assert "compare" not in shown
    assert_small(modules)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fedkeep run dig", {"digits"}),
        ("fedkeep run digits lr_", {"lr_decay=", "lr_schedule=", "lr_warmup="}),
        ("fedkeep run digits batch", {"batch_size=", "batch_size=50"}),  # after a single word bash adds a space
        ("fedkeep run digits engi", {"engine=auto", "engine=loop", "engine=stacked"}),
        ("fedkeep run digits method = fedn", {"fedntd", "fednova"}),  # as bash divides it
        ("fedkeep run digits engine =", {"auto", "loop", "stacked"}),
        ("fedkeep run digits --sweep method = fedavg,fednt", {"fedavg,fedntd"}),
        ("fedkeep run digits --sweep split.kind = label", {"label_quantity"}),
        ("fedkeep partition split = label", {"label_quantity"}),
        ("fedkeep methods fedk", {"fedka", "fedkeep"}),
        ("fedkeep tune digits --methods fedavg,fedka", {"fedavg,fedka"}),
    ],
)
def test_keys_and_names_are_completed(words: str, completed: set[str]) -> None:
    last = str(len(words.split()) - 1)
    shown, modules = output_and_imports(_FEDKEEP_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert set(shown.split()) == completed
    assert_small(modules)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fedkeep run digits --sweep method=fedn", {'"method=fednova"', '"method=fedntd"'}),
        ("fedkeep run digits deterministic=", {'"deterministic=true"', '"deterministic=false"'}),
    ],
)
def test_other_shells_do_not_divide_a_word(line: str, completed: set[str]) -> None:
    shown, modules = output_and_imports(_FEDKEEP_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert set(re.findall(r'"[^"]+"', shown)) == completed
    assert_small(modules)


def test_the_completed_names_are_all_there_are() -> None:
    from fedkeep import methods, models, optim
    from fedkeep.data import partition
    from fedkeep.data.sources import named
    from fedkeep.engine import lr_schedule, settings
    from fedkeep.experiments.overrides import TRAIN

    assert set(completion.names_of("method")) == set(methods.REGISTRY)
    assert completion.names_of("model") == list(models.REGISTRY)
    assert completion.names_of("split") == list(partition.KINDS)
    assert completion.names_of("data") == list(named.NAMES)
    assert completion.names_of("lr_schedule") == list(lr_schedule.SCHEDULES)
    assert completion.names_of("optimizer") == list(optim.OPTIMIZERS)
    assert completion.names_of("train.engine") == list(settings.ENGINES)
    assert completion.names_of("dtype") == list(settings.DTYPES)
    assert completion.names_of("autocast") == list(settings.AUTOCAST)
    assert completion.names_of("aggregation") == list(settings.SMALLEST_COHORT)
    assert completion.names_of("read_out") == list(settings.READ_OUTS)
    assert set(TRAIN) <= set(completion.keys())


def test_the_probe_notices_large_imports() -> None:
    _, modules = output_and_imports("methods", "fedavg")
    assert {"torch", "numpy", "fedkeep.engine"} <= modules


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, fedkeep; assert not {'torch', 'numpy'} & set(sys.modules); fedkeep.simulate; import torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_measures_of_forgetting_need_numpy_alone() -> None:
    code = "import sys, fedkeep.forgetting as f; print(f.forgetting([[1, 0], [0, 1]])); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    value, modules = done.stdout.splitlines()
    assert float(value) == 0.0
    assert set(modules.split()).isdisjoint(set(LARGE) - {"numpy"})
