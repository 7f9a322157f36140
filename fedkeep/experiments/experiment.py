"""Experiments: everything that says what a run is, validated, from a TOML file and `key=value` overrides.

seed = 0
method = "fedntd"                     # or a table: [method] name = "fedntd", beta = 0.5
model = "mlp"

[data]
source = "digits"

[split]
kind = "shards"
n_clients = 20
s = 2

[train]
rounds = 60
participation = 4
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from torch import nn

from fedkeep import methods, models
from fedkeep._util.text import did_you_mean
from fedkeep._util.validate import first_error
from fedkeep.data import Dataset, Partition, load, partition
from fedkeep.data.sources.common import Options
from fedkeep.engine import distributed
from fedkeep.engine.federation import Federation
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import continue_run, make_simulation, start
from fedkeep.engine.simulation import Callback
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiments.overrides import NAME_KEY, TRAIN, as_table, override
from fedkeep.runs.files import EXPERIMENT, FORMAT
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run, read_experiment, saved_round
from fedkeep.task import Task
from fedkeep.tree import Tree

PRESETS = Path(__file__).parent / "presets"
SPLITS: dict[str, Callable[..., Partition]] = {
    "iid": partition.iid,
    "shards": partition.shards,
    "dirichlet": partition.dirichlet,
    "label_quantity": partition.label_quantity,
    "by_id": partition.by_id,
}


class Experiment(BaseModel):
    """One run, said in full. `from_dict` and `load` make one; `run` runs it into a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    split: dict[str, Any]
    train: Settings = Field(default_factory=Settings)
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int | None = Field(default=None, ge=1)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Experiment:
        """Check everything that can be checked without loading the data; the error names key, value and remedy."""
        given = {key: value for key, value in given.items() if key not in ("format", "made_by", "name")}
        given = {key: as_table(key, value) for key, value in given.items()}
        _known("", given, cls.model_fields)
        given.setdefault("train", {})
        if isinstance(given["train"], dict):
            given["train"] = _settings({**given["train"], "seed": given.get("seed", 0)})
        try:
            return cls(**given)
        except ValidationError as error:
            raise first_error("", error) from None

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """Read an experiment file and apply `key=value` overrides."""
        return cls.from_dict(override(read(Path(path)), overrides))

    @field_validator("method")
    @classmethod
    def _method(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = methods.get(_subject("method", given))
        hypers = {key: value for key, value in given.items() if key != "name"}
        _known("method", hypers, kind.hyperparameters())
        kind(**hypers)
        return {"name": given["name"], **kind.defaults(), **hypers}

    @field_validator("model")
    @classmethod
    def _model(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "class" in given and "name" not in given:
            raise ConfigError(f"the model was a {given['class']} of the user's own, which a file cannot hold")
        _known("model", given, ["name", *models.options(_subject("model", given))])
        return given

    @field_validator("data")
    @classmethod
    def _data(cls, given: dict[str, Any]) -> dict[str, Any]:
        _subject("data", given)
        own = [name for name in inspect.signature(load).parameters if name != "options"]
        _known("data", given, [*own, *(f.name for f in fields(Options) if f.name != "tokenizer")])
        if given.get("public") is not None and given.get("public_ids") is not None:
            raise ConfigError("data.public and data.public_ids are two ways to choose the same: give one of them")
        return given

    @field_validator("split")
    @classmethod
    def _split(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = _subject("split", given)
        if kind not in SPLITS:
            raise ConfigError(f"unknown split {kind!r}: {did_you_mean(kind, SPLITS)}")
        options = {
            name: p for name, p in inspect.signature(SPLITS[kind]).parameters.items() if name not in ("y", "ids")
        }
        _known("split", given, ["kind", "validation", *options])
        missing = [name for name, p in options.items() if p.default is p.empty and name not in given]
        if missing:
            raise ConfigError(f"split.{missing[0]} is missing: {kind} needs it")
        return given

    def to_dict(self) -> dict[str, Any]:
        """Return the complete experiment, every default written out, as plain values."""
        train = asdict(self.train)
        train.pop("seed")
        drawn = any(self.data.get(key) is not None for key in ("public", "public_ids"))
        data = {"seed": self.seed, **self.data} if drawn else self.data
        split = self.split if self.split["kind"] == "by_id" else {"seed": self.seed, **self.split}
        return {
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
            "method": self.method,
            "model": self.model,
            "data": dict(data),
            "split": dict(split),
            "train": train,
        }

    def data_and_clients(self) -> tuple[Dataset, Partition]:
        """Load the data and divide it."""
        plain = self.to_dict()
        data = load(**plain["data"])
        kind, held = plain["split"].pop("kind"), plain["split"].pop("validation", 0.0)
        if kind == "by_id" and data.ids is None:
            raise ConfigError(f"split.kind = 'by_id': the data set {data.name} does not say whose its examples are")
        split = partition.by_id(data.ids) if kind == "by_id" else SPLITS[kind](data.y_train, **plain["split"])
        return data, split.hold_out(held, plain["split"].get("seed", self.seed)) if held else split

    def parts(self) -> Federation:
        """Build the method, the model, the data, the split and the settings."""
        data, clients = self.data_and_clients()
        options = dict(self.model)
        model = models.build(options.pop("name"), data.input_shape, data.n_classes, self.seed, **options)
        return Federation(methods.make(self.method), model, data, clients, self.train)

    def run(self, path: str | Path, callbacks: Iterable[Callback] = ()) -> History:
        """Run into a folder; a run of the same experiment that is there already is gone on with, or just read."""
        path = Path(path)
        if distributed.current_ranks().on_rank0(lambda: self._is_new(path)):
            return start(make_simulation(self.parts(), callbacks), path, self.to_dict())
        return self.resume(path, callbacks)

    def found(self, path: Path) -> History | None:
        """Read this experiment's run in a folder as far as it has come; of its files only the rounds are needed."""
        return None if self._is_new(path) else load_run(path, weights=False)

    def _is_new(self, path: Path) -> bool:
        """Say whether there is no run in a folder yet; refuse one that holds a run of another experiment."""
        if not (path / EXPERIMENT).exists():
            return True
        theirs = Experiment.from_dict(read_experiment(path)).to_dict()
        ours = {**self.to_dict(), "checkpoint_every": theirs["checkpoint_every"]}  # how often makes no other run of it
        if (key := next(iter(_differences(theirs, ours)), None)) is not None:
            raise ConfigError(
                f"{path} holds another experiment, which differs in {key}: choose another folder for this one"
            )
        return False

    def resume(self, path: Path, callbacks: Iterable[Callback] = ()) -> History:
        """Go on with this experiment's run in a folder."""
        if distributed.current_ranks().on_rank0(lambda: (saved_round(path) or 0) < self.train.rounds):
            return continue_run(path, self.parts(), callbacks)
        found = load_run(path)
        if not found.finished:
            raise RunError(f"{path} has come to its end, but the lines of its last rounds are lost: run it anew")
        found.build = self._module
        return found

    def _module(self, params: Tree) -> nn.Module:
        """Make the model with these weights; the data is loaded only when somebody asks for one."""
        federation = self.parts()
        return Task(federation.model, federation.data.n_classes, len(federation.clients)).module(params)


def read(path: Path) -> dict[str, Any]:
    """Read an experiment file, or one that comes with fedkeep under that name, as a dict."""
    if not path.exists() and path.suffix in ("", ".toml") and (PRESETS / path.with_suffix(".toml").name).exists():
        path = PRESETS / path.with_suffix(".toml").name
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = [p.stem for p in sorted(PRESETS.glob("*.toml"))]
        raise ConfigError(
            f"there is no file {path}, and no experiment of that name: {did_you_mean(path.stem, known)}"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if given.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{path} has format {given['format']!r}; this fedkeep reads format {FORMAT}: update it")
    return given


def _settings(given: dict[str, Any]) -> Settings:
    _known("train", {k: v for k, v in given.items() if k != "seed"}, TRAIN)
    if isinstance(given.get("augment"), dict):
        _known("train.augment", given["augment"], ["crop", "flip", "cutout"])
    for key, value in given.items():
        if isinstance(value, bool) and key not in ("deterministic", "tf32"):
            raise ConfigError(f"train.{key} = {str(value).lower()}: true and false mean nothing here")
    try:
        return TypeAdapter(Settings).validate_python(given)
    except ValidationError as error:
        raise first_error("train.", error) from None


def _subject(section: str, given: dict[str, Any]) -> str:
    name = given.get(NAME_KEY[section])
    if not isinstance(name, str):
        raise ConfigError(f"{section}.{NAME_KEY[section]} is missing or not a name")
    return name


def _known(section: str, given: dict[str, Any], valid: Iterable[str]) -> None:
    for key in given:
        if key not in (names := sorted(valid)):
            where = f"{section}.{key}" if section else key
            raise ConfigError(f"unknown key {where!r}: {did_you_mean(key, names)}")


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key in dict.fromkeys([*a, *b]):
        if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            yield from _differences(a[key], b[key], f"{prefix}{key}.")
        elif a.get(key) != b.get(key):
            yield f"{prefix}{key}"
