"""Experiments: everything that defines a run, read from a TOML file and `key=value` overrides, and validated.

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
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedkeep import methods, models
from fedkeep._util.own_parts import import_from
from fedkeep._util.text import did_you_mean, format_value, join_names
from fedkeep._util.toml import parse_toml
from fedkeep._util.validate import first_error, require_bool, require_choice, require_label, require_number
from fedkeep.data import load, partition
from fedkeep.data.dataset import BOUNDS
from fedkeep.data.normalise import check_normalise
from fedkeep.data.public_options import check_public_options
from fedkeep.data.reductions import require_effect
from fedkeep.data.sources.common import Options
from fedkeep.engine import requirements
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, MethodError, UnsupportedMethod
from fedkeep.experiments import own_parts
from fedkeep.experiments.overrides import NAME_KEY, as_table, override
from fedkeep.experiments.paths import with_absolute_paths
from fedkeep.experiments.table_checks import not_a_name, parse_settings, require_known, require_name, require_one_method
from fedkeep.runs.federation_copy import with_own_files
from fedkeep.runs.files import EXPERIMENT, FORMAT, READABLE_FORMATS, ROUNDS, is_there

PRESETS = Path(__file__).parent / "presets"


class Experiment(BaseModel):
    """Everything that defines a run, as data. `from_dict` and `load` make one; `experiments.run.run` runs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    split: dict[str, Any]
    train: Settings = Field(default_factory=Settings)
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int | None = Field(default=None, ge=1)
    keep: int | None = Field(default=None, ge=1)  # checkpoints; by default 3
    label: str | None = None  # the name of its group in comparisons
    callbacks: list[dict[str, Any]] = Field(default_factory=list)  # of the user's own; they are no part of a result
    metrics: dict[str, str] = Field(default_factory=dict)  # of the user's own, by name

    @classmethod
    def from_dict(cls, tables: dict[str, Any], given: bool = False) -> Experiment:
        """Return the experiment that these tables define. Names, keys and settings are checked; data is not loaded.

        An error names the key, the value and the valid choices. `given` says that the user wrote the tables: then the
        code that they name is imported and checked too, unless they are those of a run, and paths become absolute.
        """
        recorded = "made_by" in tables  # the experiment of a run
        if given and not recorded:
            own_parts.trust_given(tables)
            tables = with_absolute_paths(tables, Path.cwd(), must_exist=True)
        tables = {key: as_table(key, value) for key, value in tables.items() if key not in _METADATA_KEYS}
        if recorded and "method" in tables:
            tables["method"] = methods.with_values_before(tables["method"])
        require_known("", tables, cls.model_fields)
        tables.setdefault("train", {})
        if isinstance(tables["train"], dict):
            settings = parse_settings({**tables["train"], "seed": tables.get("seed", 0)})
            if not recorded:  # runs of earlier versions are read as they are
                require_effect(settings.reductions, settings.rounds, "train.", ConfigError)
            tables["train"] = settings
        if missing := [key for key in NAME_KEY if key not in tables]:
            raise ConfigError(
                f"{join_names(missing)} {'is' if len(missing) == 1 else 'are'} missing: an experiment has a method, a "
                "model, data and a split (fedkeep new FILE.toml writes an example)",
                key=missing[0],
                valid=missing,
            )
        for key in NAME_KEY:
            if not isinstance(tables[key], dict):
                raise not_a_name(key, tables[key])
        try:
            made = cls(**tables)
        except ValidationError as error:
            raise first_error("", error) from None
        if given and not recorded:
            own_parts.check_parts(made)
        if not recorded:
            made.require_supported_method()
            if made.train.read_out is not None:
                made.require_public_set(f'train.read_out = "{made.train.read_out}"')
        return made

    def require_supported_method(self) -> None:
        """Raise if the method cannot be trained with these settings, or with this model; data is not loaded."""
        method = methods.make(self.method)
        section = "train"
        try:
            requirements.require_settings(method, self.train)
            section = "model"
            requirements.require_model(method, self.model)
        except MethodError as error:
            raise UnsupportedMethod(
                str(error), key=f"{section}.{error.key}", value=error.value, valid=error.valid
            ) from None

    @property
    def has_public_set(self) -> bool:
        """Whether the server has labelled examples."""
        return any(self.data.get(key) is not None for key in ("public", "public_ids"))

    def require_public_set(self, what: str, otherwise: str = "") -> None:
        """Raise if there is no public set, which something else in the experiment needs."""
        if not self.has_public_set:
            raise ConfigError(
                f"{what} needs labelled examples on the server: set data.public, for example to 0.1{otherwise}",
                key="data.public",
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """Read an experiment file and apply `key=value` overrides."""
        own_parts.trust_given(override({}, overrides := list(overrides)))
        return cls.from_dict(override(read(Path(path)), overrides), given=True)

    @field_validator("label", mode="before")
    @classmethod
    def _label(cls, value: Any) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if value is None else require_label(str(value) if is_number else value, ConfigError)

    @field_validator("method")
    @classmethod
    def _method(cls, table: dict[str, Any]) -> dict[str, Any]:
        kind = methods.get(require_one_method(table))
        hyperparameters = {key: value for key, value in table.items() if key != "name"}
        require_known("method", hyperparameters, ["name", *kind.hyperparameters()], of=f" of {kind.name}")
        kind(**hyperparameters)
        return {"name": methods.canonical_name(table["name"]), **kind.defaults(), **hyperparameters}

    @field_validator("callbacks", mode="before")
    @classmethod
    def _callbacks(cls, given: Any) -> list[dict[str, Any]]:
        return own_parts.parse_callbacks(given)

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics(cls, given: Any) -> dict[str, str]:
        return own_parts.metric_names(given)

    @field_validator("model")
    @classmethod
    def _model(cls, table: dict[str, Any]) -> dict[str, Any]:
        if "class" in table and "name" not in table:
            raise ConfigError(
                f"the model class {table['class']} is defined in Python; an experiment file cannot build it",
                key="model.class",
                value=table["class"],
            )
        if not own_parts.is_own("model", require_name("model", table)):
            require_known("model", table, ["name", *models.options(table["name"])])
        return table

    @field_validator("data")
    @classmethod
    def _data(cls, table: dict[str, Any]) -> dict[str, Any]:
        is_own = own_parts.is_own("data", require_name("data", table))
        own = [name for name in inspect.signature(load).parameters if name != "options"]
        if not is_own:
            require_known("data", table, [*own, *(f.name for f in fields(Options))])
        if not is_own and not isinstance(table.get("tokenizer", ""), str):
            raise ConfigError(
                f"data.tokenizer must be a text, not {format_value(table['tokenizer'])}: a function can be given in "
                "Python only",
                key="data.tokenizer",
                value=table["tokenizer"],
            )
        for name, bounds in BOUNDS.items():
            if table.get(name) is not None:
                require_number(f"data.{name}", table[name], **bounds, error=ConfigError)
        require_bool("data.public_only", table.get("public_only", False), ConfigError)
        check_public_options(table, "data.", ConfigError)
        check_normalise(table, "data.", ConfigError)
        return table

    @field_validator("split")
    @classmethod
    def _split(cls, table: dict[str, Any]) -> dict[str, Any]:
        kind = require_choice("split.kind", require_name("split", table), partition.KINDS, error=ConfigError)
        parameters = inspect.signature(partition.KINDS[kind]).parameters.items()
        options = {name: parameter for name, parameter in parameters if name not in ("y", "ids")}
        if kind == "file" and "validation" in table:
            raise ConfigError(
                "split.validation cannot be set for a split from a file: leave held-out examples out of the file",
                key="split.validation",
                value=table["validation"],
            )
        require_known("split", table, ["kind", *(["validation"] if kind != "file" else []), *options])
        for name, parameter in options.items():
            if parameter.default is parameter.empty and name not in table:
                raise ConfigError(f"split.{name} is missing: {kind} needs it", key=f"split.{name}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return the complete experiment, with every default, as data that TOML can hold."""
        train = asdict(self.train)
        train.pop("seed")
        data = {"seed": self.seed, **self.data} if self.has_public_set else self.data
        split = self.split if self.split["kind"] in ("by_id", "file") else {"seed": self.seed, **self.split}
        return {
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
            "keep": self.keep,
            "label": self.label,
            **({"callbacks": self.callbacks} if self.callbacks else {}),
            **({"metrics": self.metrics} if self.metrics else {}),
            "method": self.method,
            "model": self.model,
            "data": dict(data),
            "split": dict(split),
            "train": train,
        }


_METADATA_KEYS = ("format", "made_by", "name")  # keys of an experiment file that do not define the run


def read(path: Path) -> dict[str, Any]:
    """Read an experiment file as a dict. The name of an experiment that comes with fedkeep also works as a path.

    Files that it names are relative to it.
    In a run folder's file, the folder's own copy stands for the files of the split and the cohorts.
    """
    try:
        if not path.exists() and path.suffix in ("", ".toml") and (PRESETS / path.with_suffix(".toml").name).exists():
            path = PRESETS / path.with_suffix(".toml").name
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = [p.stem for p in sorted(PRESETS.glob("*.toml"))]
        raise ConfigError(
            f"there is no experiment file {path}, and none of that name comes with fedkeep: "
            f"{did_you_mean(path.stem, presets)}",
            key="file",
            value=str(path),
            valid=presets,
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}", key="file", value=str(path)) from None
    if (version := tables.get("format", FORMAT)) not in READABLE_FORMATS:
        raise ConfigError(
            f"{path} has format {format_value(version)}; this version of fedkeep reads formats 1 and {FORMAT}: "
            "update fedkeep",
            key="format",
            value=version,
            valid=READABLE_FORMATS,
        )
    of_run = path.name == EXPERIMENT and is_there(path.parent / ROUNDS)
    if of_run:
        tables = {**with_own_files(tables, path.parent), "made_by": tables.get("made_by", {})}
    if "made_by" in tables:
        return tables
    if own_parts.named_code(tables):
        import_from(path.parent)
    return with_absolute_paths(tables, path.parent)
