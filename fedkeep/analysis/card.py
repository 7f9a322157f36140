"""Model card: a folder with the final weights of a run, what the model takes, and a README.md on how it was trained.

The README.md starts with the header that the Hugging Face Hub reads. Names come from run folders and may contain
anything, so every one is escaped: as a JSON string in the header, which is YAML, and as text in Markdown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import safetensors.torch

from fedkeep import methods, models, tree
from fedkeep._util.json import flatten
from fedkeep._util.text import format_mean, join_names, list_some, printable
from fedkeep.analysis.card_inputs import INPUTS, WEIGHTS, inputs_of, to_json, use_code
from fedkeep.analysis.groups import Group, Run
from fedkeep.analysis.labels import data_name
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import FedkeepError, RunError
from fedkeep.runs.files import is_there, make_folder, read_bytes, write_atomic
from fedkeep.runs.reading import load_run
from fedkeep.tree import Tree

CARD = "README.md"
_START = "---\nlibrary_name: fedkeep"  # of a card, by which it is recognised
_INPUTS = {  # what the file of the inputs has, by its keys
    "input_shape": "the shape of an input (`input_shape`)",
    "features": "the names of the inputs in their order (`features`)",
    "mean": "the `mean` and `std` that they are normalised with",
    "classes": "the names of the classes 0, 1, ... (`classes`)",
}
_MEASURES = {  # of a summary: the heading, and whether it is a share shown in percent
    "final": ("test accuracy (%)", True),
    "best": ("best test accuracy of a round (%)", True),
    "forgetting": ("forgetting", False),
    "round_forgetting": ("forgetting from one round to the next", False),
}


@dataclass(frozen=True)
class Card:
    """A model card: the runs it tells about, which differ in the seed alone, and the one whose weights it has."""

    group: Group
    run: Run
    params: Tree
    problem: str  # data, split, clients and rounds

    @property
    def name(self) -> str:
        """The name of the model: the user's label, or method, model and data."""
        setting = self.group.setting
        parts = (setting["method"]["name"], setting["model"].get("name", "model"), data_name(setting["data"]))
        return printable(setting.get("label") or "-".join(parts))

    @property
    def data(self) -> str:
        """The name of the data: as on the Hub, if it came from there; of a file without its folders."""
        data = self.group.setting["data"]
        source = str(data.get("source", ""))
        return source.removeprefix("hf:") if source.startswith("hf:") else data_name(data)

    def readme(self) -> str:
        """Return the README.md."""
        parts = [_header(self), f"# {_text(self.name)}", _introduction(self), _figures(self), _classes(self)]
        parts += [_settings(self), _use(self)]
        return "\n\n".join(parts) + "\n"


def write_card(paths: Iterable[str | Path], folder: Path, seed: int | None = None) -> Card:
    """Write card and weights of one experiment into a folder, and return the card.

    The runs may differ in the seed alone. The weights are those of `seed`, by default of the smallest one. A README.md
    that is no model card is not overwritten.
    """
    _require_own(folder / CARD)
    card = read_card(paths, seed)
    make_folder(folder)
    flat = tree.to_cpu_copies(card.params)
    write_atomic(folder / WEIGHTS, safetensors.torch.save(flat, metadata={"format": "pt"}))
    write_atomic(folder / INPUTS, to_json(inputs_of(card.run)))
    write_atomic(folder / CARD, card.readme().encode())
    return card


def _require_own(file: Path) -> None:
    """Raise if there is a file of this name that `write_card` did not write."""
    if is_there(file) and not read_bytes(file).startswith(f"{_START}\n".encode()):
        raise FedkeepError(
            f"{printable(file)} exists and is not a model card of fedkeep: choose another folder",
            key="--card",
            value=str(file.parent),
        )


def read_card(paths: Iterable[str | Path], seed: int | None = None) -> Card:
    """Read the runs of one experiment, and the weights of one of them; raise if they are several experiments."""
    found = read_runs(paths)
    groups = found.groups
    if len(groups) > 1:
        raise RunError(
            f"a model card is about one experiment, and these runs are {len(groups)} "
            f"({list_some([g.label for g in groups])}): name the runs of one",
            key="run",
            valid=[g.label for g in groups],
        )
    [group] = groups
    if not group.finished:
        raise RunError(f"{group.label}: a model card needs finished runs", key="run", value=group.label)
    seeds = sorted(group.seeds)
    if seed is not None and seed not in seeds:
        raise FedkeepError(
            f"no run has the seed {seed}: valid are {', '.join(map(str, seeds))}", key="seed", value=seed, valid=seeds
        )
    run = next(run for run in group.runs if run.seed == (seeds[0] if seed is None else seed))
    assert run.history.folder is not None
    params = load_run(run.history.folder).params
    if not params:
        raise RunError(f"{printable(run.history.folder)} has no weights of its last round", key="run", value=run.name)
    return Card(group, run, params, found.problems[0].title)


def _header(card: Card) -> str:
    """Return the header: YAML in which every text is a JSON string, which is YAML too."""
    setting = card.group.setting
    method, data = setting["method"]["name"], card.data
    lines = [
        _START,
        "tags:",
        "- federated-learning",
        *(f"- {_quoted(tag)}" for tag in (method, setting["model"].get("name")) if tag),
        "datasets:",
        f"- {_quoted(data)}",
        "metrics:",
        "- accuracy",
        "model-index:",
        f"- name: {_quoted(card.name)}",
        "  results:",
        "  - task:",
        f"      type: {_task(setting['model'])}",
        "    dataset:",
        f"      name: {_quoted(data)}",
        f"      type: {_quoted(data)}",
        "      split: test",
        "    metrics:",
    ]
    for kind, measure, name in (("accuracy", "final", "Test accuracy"), ("forgetting", "forgetting", "Forgetting")):
        if math.isfinite(mean := card.group.mean[measure]):
            lines += [f"    - type: {kind}", f"      value: {mean:.6f}", f"      name: {_quoted(_over(card, name))}"]
    return "\n".join([*lines, "---"])


def _over(card: Card, name: str) -> str:
    number = len(card.group.runs)
    return name if number == 1 else f"{name}, mean over {number} seeds"


def _introduction(card: Card) -> str:
    name, made_by = card.group.setting["method"]["name"], card.run.history.about.get("made_by", {})
    paper = getattr(methods.REGISTRY.get(name), "paper", "")
    versions = ", ".join(f"{what} {_text(made_by[what])}" for what in ("fedkeep", "torch") if what in made_by)
    cited = f"{_text(name)} ({_text(paper)})" if paper else _text(name)
    text = f"Trained by federated learning with {cited}: {_text(card.problem)}."
    return f"{text} Made with {versions}." if versions else text


def _figures(card: Card) -> str:
    group, several = card.group, len(card.group.runs) > 1
    heads = ["measure", "mean±standard deviation", f"these weights (seed {card.run.seed})"]
    rows = [heads if several else ["measure", "value"]]
    for measure, (heading, percent) in _MEASURES.items():
        scale, digits = (100, 1) if percent else (1, 3)
        mean, spread, own = group.mean[measure], group.spread[measure], card.run.summary[measure]
        if math.isfinite(mean):
            cells = [heading, format_mean(mean, spread, digits, scale), format_mean(own, None, digits, scale)]
            rows.append(cells[: len(heads) if several else 2])
    seeds = join_names([str(seed) for seed in sorted(group.seeds)])
    about = (
        f"Seed{'s' * several}: {seeds}. All figures are of the global model on the test set. Forgetting is how far "
        "each class ends below its best earlier round, mean over classes (Lee et al., NeurIPS 2022, eq. 5)."
    )
    return f"## Figures\n\n{_table(rows)}\n\n{about}"


def _classes(card: Card) -> str:
    run = card.run
    rows = [["class", "accuracy (%)", "below its best earlier round (points)"]]
    for c, (accuracy, lost) in enumerate(zip(run.class_accuracy[-1], run.below_best, strict=True)):
        if math.isfinite(accuracy):  # the test set has the class
            rows.append([_text(run.history.class_name(c)), f"{100 * accuracy:.1f}", f"{100 * lost:.1f}"])
    return f"## Accuracy by class\n\nOf these weights (seed {run.seed}).\n\n{_table(rows)}"


def _settings(card: Card) -> str:
    tables = {key: value for key, value in card.group.setting.items() if key != "label"}
    tables["data"] = {**tables["data"], "source": card.data}
    rows = [["key", "value"], *([_text(k), _text(_shown(v))] for k, v in flatten(tables).items() if v is not None)]
    return f"## Method, model, data, split and settings\n\n{_table(rows)}"


def _shown(value: Any) -> str:
    """Return a setting as text; of a path only the name, since folders are nobody else's business."""
    if isinstance(value, str):
        return PurePath(value).name if value.startswith(("/", "~", ".")) else value
    return json.dumps(value, default=str)


def _use(card: Card) -> str:
    """Return how to load the weights and what the model takes."""
    number, inputs = sum(leaf.numel() for leaf in tree.leaves(card.params)), inputs_of(card.run)
    about = [f"`{WEIGHTS}` has the {number:,} trained weights, by the names of the model's parameters."]
    if parts := [text for key, text in _INPUTS.items() if key in inputs]:
        about.append(f"`{INPUTS}` has {join_names(parts)}.")
    if "normalise" in card.group.setting["data"] and "mean" not in inputs:
        about.append("The inputs were normalised, but the run folder does not have their mean and standard deviation.")
    given = card.run.history.about.get("made_by", {}).get("model_name")
    code = use_code(card.group.setting, given if isinstance(given, str) else None, inputs)
    return f"## Use\n\n{' '.join(about)}\n\n```python\n{code}\n```"


def _task(model: Mapping[str, Any]) -> str:
    """Return the Hub's name of the task, as far as the model says."""
    name = str(model.get("name", ""))
    if name in models.TEXT_MODELS:
        return "text-classification"
    return "image-classification" if name.startswith(("cnn", "resnet")) else "other"


def _quoted(text: object) -> str:
    """Return a text as a YAML string on one line.

    >>> print(_quoted('a": b\\n- c'))
    "a\\": b\\\\n- c"
    """
    return json.dumps(printable(text), ensure_ascii=False)


def _text(text: object) -> str:
    """Return text in which Markdown and HTML mean nothing.

    >>> print(_text("fedavg_finetune <b>|x|</b>"))
    fedavg\\_finetune &lt;b>\\|x\\|&lt;/b>
    """
    return re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", printable(text)).replace("&", "&amp;").replace("<", "&lt;")


def _table(rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "|---" * len(rows[0]) + "|", *others])
