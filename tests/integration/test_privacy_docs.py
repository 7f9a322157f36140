"""The page on differential privacy agrees with what the methods declare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedkeep as fk
from fedkeep.engine import footprint
from fedkeep.engine.settings import SMALLEST_COHORT

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_the_table_of_methods(name: str) -> None:
    page = (DOCS / "privacy.md").read_text()
    [row] = re.findall(rf"^\| `{name}` \| (.*?) \| (\w+) \| (\w+) \| (\w+) \|$", page, flags=re.MULTILINE)
    method = fk.methods.get(name)()
    size = footprint.footprint(method)
    models = [entry for entry in size.sends if entry in ("c", "u", "v", "w_bar", "older", "delta", "generator")]
    assert tuple(re.findall(r"`(\w+)`", row[0])) == method.averaged
    assert row[1] == ("yes" if "params" in method.averaged else "refused")
    assert row[2] == ("yes" if set(size.uploads) <= {"params", "n"} and not models else "refused")
    assert row[3] == ("yes" if method.averaged == ("params",) and not method.uses("aggregate") else "refused")


def test_the_threat_model_names_every_way_to_aggregate() -> None:
    page = (DOCS / "threat-model.md").read_text()
    assert [kind for kind in SMALLEST_COHORT if f"`{kind}`" not in page] == []
