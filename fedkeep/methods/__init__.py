"""Methods, one short file each. `REGISTRY` lists them; other packages add theirs through an entry point.

>>> get("fedntd")().beta
1.0
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from fedkeep._util.text import did_you_mean
from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.methods.fedacg import FedACG
from fedkeep.methods.fedala import FedALA
from fedkeep.methods.fedalign import FedAlign
from fedkeep.methods.fedavg_finetune import FedAvgFinetune
from fedkeep.methods.fedavgm import FedAvgM
from fedkeep.methods.fedcad import FedCAD
from fedkeep.methods.fedcm import FedCM
from fedkeep.methods.fedcurv import FedCurv
from fedkeep.methods.feddecorr import FedDecorr
from fedkeep.methods.feddf import FedDF
from fedkeep.methods.feddistill import FedDistill
from fedkeep.methods.feddyn import FedDyn
from fedkeep.methods.fedexp import FedExP
from fedkeep.methods.fedfomo import FedFOMO
from fedkeep.methods.fedgen import FedGen
from fedkeep.methods.fedgkd import FedGKD
from fedkeep.methods.fedgkd_vote import FedGKDVote
from fedkeep.methods.fedinit import FedInit
from fedkeep.methods.fedka import FedKA
from fedkeep.methods.fedkeep import FedKeep
from fedkeep.methods.fedlc import FedLC
from fedkeep.methods.fedlmd import FedLMD
from fedkeep.methods.fednova import FedNova
from fedkeep.methods.fedntd import FedNTD
from fedkeep.methods.fedpac import FedPAC
from fedkeep.methods.fedprox import FedProx
from fedkeep.methods.fedreg import FedReg
from fedkeep.methods.fedrod import FedRoD
from fedkeep.methods.fedrs import FedRS
from fedkeep.methods.fedsam import FedSAM
from fedkeep.methods.fedsol import FedSOL
from fedkeep.methods.fedssd import FedSSD
from fedkeep.methods.fedvarp import FedVARP
from fedkeep.methods.fedvls import FedVLS
from fedkeep.methods.flashback import Flashback
from fedkeep.methods.gcfed import GCFed
from fedkeep.methods.moon import MOON
from fedkeep.methods.scaffold import Scaffold

__all__ = [
    "MOON",
    "REGISTRY",
    "FedACG",
    "FedALA",
    "FedAlign",
    "FedAvg",
    "FedAvgFinetune",
    "FedAvgM",
    "FedCAD",
    "FedCM",
    "FedCurv",
    "FedDF",
    "FedDecorr",
    "FedDistill",
    "FedDyn",
    "FedExP",
    "FedFOMO",
    "FedGKD",
    "FedGKDVote",
    "FedGen",
    "FedInit",
    "FedKA",
    "FedKeep",
    "FedLC",
    "FedLMD",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedProx",
    "FedRS",
    "FedReg",
    "FedRoD",
    "FedSAM",
    "FedSOL",
    "FedSSD",
    "FedVARP",
    "FedVLS",
    "Flashback",
    "GCFed",
    "Scaffold",
    "canonical_name",
    "discover",
    "get",
    "is_built_in",
    "make",
    "with_values_before",
]

ENTRY_POINT_GROUP = "fedkeep.methods"

REGISTRY: dict[str, type[FedAvg]] = {
    cls.name: cls
    for cls in (
        FedAvg,
        FedKeep,
        FedProx,
        FedAvgM,
        Scaffold,
        FedNova,
        MOON,
        FedNTD,
        FedLMD,
        GCFed,
        FedRS,
        FedLC,
        FedVLS,
        FedRoD,
        FedDecorr,
        FedDistill,
        FedGen,
        FedAlign,
        FedGKD,
        FedGKDVote,
        FedCurv,
        FedDyn,
        FedCM,
        FedACG,
        FedVARP,
        FedExP,
        FedInit,
        FedSAM,
        FedSOL,
        FedReg,
        FedKA,
        FedSSD,
        FedCAD,
        FedALA,
        FedFOMO,
        FedPAC,
        Flashback,
        FedDF,
        FedAvgFinetune,
    )
}

_log = logging.getLogger(__name__)


def discover() -> dict[str, type[FedAvg]]:
    """Add the methods of installed packages (entry point group `fedkeep.methods`) to the registry; return all.

    In the package's pyproject.toml, for a class `MyMethod(fedkeep.method.FedAvg)` in `mypackage.mymethod`:

        [project.entry-points."fedkeep.methods"]
        mymethod = "mypackage.mymethod:MyMethod"
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in REGISTRY:
            continue
        try:
            cls = point.load()
        except Exception as error:
            _log.warning("the method %s of another package cannot be loaded (%s): %s", point.name, point.value, error)
            continue
        if not (isinstance(cls, type) and issubclass(cls, FedAvg)):
            _log.warning("the entry point %s (%s) is not a subclass of FedAvg; ignored", point.name, point.value)
            continue
        REGISTRY[point.name] = cls
    return REGISTRY


def get(name: str) -> type[FedAvg]:
    """Return the method of this name, from fedkeep or from an installed package."""
    return REGISTRY[canonical_name(name)]


def canonical_name(name: str) -> str:
    """Return the registered name of a method; case, dashes and underscores do not matter.

    >>> canonical_name("FedNTD"), canonical_name("FedAvg-finetune")
    ('fedntd', 'fedavg_finetune')
    """
    found = _like(name, REGISTRY) or _like(name, discover())
    if found:
        return name if name in found else found[0]
    raise MethodError(
        f"unknown method {name!r}: {did_you_mean(name, REGISTRY)}", key="method.name", value=name, valid=REGISTRY
    )


def _like(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that differ from this one in case, dashes and underscores at most."""

    def simplify(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    return [other for other in known if simplify(other) == simplify(name)]


def is_built_in(cls: type[FedAvg]) -> bool:
    """Return whether a method belongs to fedkeep itself, not to another package or to a script."""
    return cls.__module__.partition(".")[0] == "fedkeep"


def make(values: Mapping[str, Any]) -> FedAvg:
    """Return the method that `to_dict` wrote: its name, and its hyperparameters or some of them.

    >>> make({"name": "fedntd", "beta": 0.5}).beta
    0.5
    """
    hypers = dict(values)
    return get(hypers.pop("name"))(**hypers)


def with_values_before(table: Any) -> Any:
    """Add to a run's method the hyperparameters that did not exist when it was made, if the method is known."""
    kind = REGISTRY.get(table.get("name", "")) if isinstance(table, dict) else None
    return table if kind is None else {**kind.values_before(), **table}
