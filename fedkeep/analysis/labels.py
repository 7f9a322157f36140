"""Names of groups and problems: what differs between them, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fedkeep._util.json import flatten
from fedkeep._util.text import clip, printable
from fedkeep.engine.settings import Settings

if TYPE_CHECKING:
    from fedkeep.analysis.groups import Group, Problem

MAX_LABEL, MAX_PART = 60, 28
_STOPPED = {"unfinished": "unfinished at round", "diverged": "diverged after round"}
_SHOWN_UNLESS_DEFAULT = ("aggregation", "hostile", "dp_delta")
_MODEL_FACTS = ("model.layers", "model.class", "model.structure", "model.shapes")  # what a model is, not its options
_HASHES = {  # keys whose values are hashes, and what to call them
    "model.shapes": "weights",
    "model.structure": "model",
    "data.contents": "data",
    "split.contents": "split",
    "train.cohorts": "cohorts",
    "criterion.code": "criterion",
    "method.code": "code",
}


def set_labels(groups: Sequence[Group]) -> None:
    """Label each group of a problem by its label or method, and by what else differs, without default values."""
    settings = [flatten(g.setting) for g in groups]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in ("method.name", "label"))
    differing = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    names = [_own_name(g) for g in groups]
    taken: dict[str, int] = {}
    for g, setting, name in zip(groups, settings, names, strict=True):
        parts = _parts(g, setting, settings, differing)
        if "label" in setting:  # a name that the user chose needs no explanation, unless it stands for several groups
            others = [other for other, its_name in zip(groups, names, strict=True) if its_name == name]
            parts = [] if len({repr(other.setting) for other in others}) == 1 else [_method_name(g), *parts]
        stopped = [] if g.finished else [f"{_STOPPED[g.status]} {g.last_round}"]
        label = clip(f"{clip(name, MAX_PART)} ({', '.join(parts)})" if parts else name, MAX_LABEL)
        label = f"{label} ({stopped[0]})" if stopped else label
        taken[label] = taken.get(label, 0) + 1
        g.label = label if taken[label] == 1 else f"{label} #{taken[label]}"


def set_titles(problems: Sequence[Problem]) -> None:
    """Title each problem by data, split, clients and rounds, and by what else differs where that is the same."""
    flat = [flatten(problem.tables) for problem in problems]
    titles = [_title(problem.tables) for problem in problems]
    taken: dict[str, int] = {}
    for problem, table, title in zip(problems, flat, titles, strict=True):
        same = [other for other, its_title in zip(flat, titles, strict=True) if its_title == title]
        keys = dict.fromkeys(key for other in same for key in other)
        differing = [key for key in keys if len({repr(other.get(key)) for other in same}) > 1 and key in table]
        full = ", ".join([title, *(clip(_format(key, table[key]), MAX_PART) for key in differing)])
        taken[full] = taken.get(full, 0) + 1
        problem.title = full if taken[full] == 1 else f"{full}, other split #{taken[full]}"


def _own_name(g: Group) -> str:
    return printable(g.setting.get("label", _method_name(g)))


def _method_name(g: Group) -> str:
    return printable(g.setting["method"]["name"])


def _parts(
    g: Group, setting: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], differing: Sequence[str]
) -> list[str]:
    options = [key for key in differing if key.startswith("model.") and key not in _MODEL_FACTS]
    parts = []
    for key in differing:
        if key == "model.layers" or key not in setting or _is_default(g, key):
            continue
        if key == "model.class" or (key == "criterion.code" and _say_as_much(["criterion.name"], key, settings)):
            continue  # the structure says more, the name as much
        if key in ("model.structure", "model.shapes") and _say_as_much(options, key, settings):
            continue
        if key == "model.structure":
            parts.append(_model_part(setting, settings))
        elif key != "model.shapes" or "model.structure" not in differing:
            parts.append(_format(key, setting[key]))
    return [clip(part, MAX_PART) for part in parts]


def _say_as_much(names: Sequence[str], code: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether settings with different codes differ in these names too."""
    pairs = {(repr([setting.get(name) for name in names]), repr(setting.get(code))) for setting in settings}
    return len({its_names for its_names, _ in pairs}) == len(pairs)


def _model_part(setting: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the layers that the models of the other groups do not all have, or a hash if the layers are the same."""
    others = [set(other.get("model.layers", ())) for other in settings]
    common = set.intersection(*others)
    own = [layer for layer in setting.get("model.layers", ()) if layer not in common]
    return printable(", ".join(own)) if own else _format("model.structure", setting["model.structure"])


def _format(key: str, value: Any) -> str:
    if key in _HASHES:
        return f"{_HASHES[key]} {str(value)[:6]}"
    text = f"{value:g}" if isinstance(value, float) else printable(value)
    return f"{printable(key.removesuffix('.name').rpartition('.')[2])}={text}"


def _is_default(g: Group, key: str) -> bool:
    """Return whether a key has its default and differs only because other groups lack it, or says nothing new."""
    from fedkeep import methods

    section, _, name = key.partition(".")
    if section == "train" and name in _SHOWN_UNLESS_DEFAULT:
        return bool(g.setting["train"].get(name) == getattr(Settings, name))
    name_of_method = g.setting["method"]["name"]
    kind = methods.REGISTRY.get(name_of_method) or methods.discover().get(name_of_method)
    return section == "method" and kind is not None and kind.defaults().get(name) == g.setting["method"].get(name)


def data_name(data: Mapping[str, Any]) -> str:
    """Return what the data is called: the source's name, of a file without its folders."""
    source = printable(data.get("source", "data"))
    return PurePath(source).name or source


def _title(tables: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(problem_facts(tables))


def problem_facts(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a problem is, in a few words each: data, split, clients, cohort, rounds."""
    data, split, train = tables["data"], tables["split"], tables["train"]
    options = {key: value for key, value in split.items() if key not in ("kind", "n_clients", "seed")}
    listed = ", ".join(f"{printable(key)} {printable(value)}" for key, value in options.items())
    kind = printable(split.get("kind", "own split"))
    parts = [clip(data_name(data), 30), clip(f"{kind} ({listed})" if listed else kind, 40)]
    if "n_clients" in split:
        parts.append(f"{printable(split['n_clients'])} clients")
    return [*parts, *_cohort(train), f"{train.get('rounds')} rounds"]


def _cohort(train: Mapping[str, Any]) -> list[str]:
    """Return how many clients a round has; nothing if a run does not say so."""
    if train.get("cohorts") is not None:
        return ["given cohorts"]
    if (share := train.get("participation")) is None:
        return []
    return [f"{100 * share:g}% per round" if isinstance(share, float) else f"{printable(share)} per round"]
