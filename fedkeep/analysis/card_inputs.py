"""What a model card says about using the model: its inputs and classes as JSON, and code that runs in its folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from fedkeep import models
from fedkeep.analysis.groups import Run

INPUTS, WEIGHTS = "inputs.json", "model.safetensors"
_IMPORTS = "import fedkeep as fk\nfrom safetensors.torch import load_file"


def inputs_of(run: Run) -> dict[str, Any]:
    """Return what the model takes and predicts, as far as the run folder has it.

    `input_shape` and `n_classes` are what it was built for, `features` the names of the inputs in their order, `mean`
    and `std` those that the inputs are normalised with, `classes` the names of class 0, 1, ... Values of another form
    than a run writes are left out.
    """
    made_by = run.history.about.get("made_by", {})
    inputs = made_by.get("inputs", {})
    inputs = inputs if isinstance(inputs, Mapping) else {}
    shape, number = made_by.get("input_shape"), made_by.get("n_classes")
    mean, std, features = (inputs.get(key) for key in ("mean", "std", "features"))
    normalised = _are_numbers(mean) and _are_numbers(std)
    found = {
        "input_shape": shape if isinstance(shape, list) and shape and all(map(_is_size, shape)) else None,
        "n_classes": number if _is_size(number) else None,
        "features": features if isinstance(features, list) and all(isinstance(f, str) for f in features) else None,
        "mean": mean if normalised else None,
        "std": std if normalised else None,
        "classes": None if run.history.class_names is None else list(run.history.class_names),
    }
    return {key: value for key, value in found.items() if value is not None}


def to_json(inputs: Mapping[str, Any]) -> bytes:
    """Return the inputs as a JSON file."""
    return f"{json.dumps(inputs, indent=1, ensure_ascii=False)}\n".encode(errors="replace")


def use_code(setting: Mapping[str, Any], given: str | None, inputs: Mapping[str, Any]) -> str:
    """Return code that builds the model, loads its weights and, if what it takes is known, predicts.

    `given` is the name of a model that was built for the run by its name alone.
    """
    model = dict(setting["model"]) if given is None else {"name": given}
    loading, source = _loading(model), str(setting["data"].get("source", ""))
    if not {"input_shape", "n_classes"} <= inputs.keys() or not _is_built_in(model):
        return f"{_IMPORTS}\n\n{_building(model, source)}\n{loading}"
    shape = f"inputs['input_shape'], inputs['n_classes']{_options(model)}"
    classes = "[inputs['classes'][c] for c in predicted]" if "classes" in inputs else "predicted"
    lines = [
        f"import json\n\nimport torch\n{_IMPORTS}\n",
        f"inputs = json.load(open({INPUTS!r}, encoding='utf-8'))",
        f"model = fk.models.build({model['name']!r}, {shape})",
        f"{loading}\nmodel.eval()\n",
        f"x = torch.zeros(1, *inputs['input_shape'])  # your examples: {_example(inputs)}",
        *(["x = (x - torch.tensor(inputs['mean'])) / torch.tensor(inputs['std'])"] if "mean" in inputs else []),
        "with torch.no_grad():\n    predicted = model(x).argmax(1).tolist()",
        f"print({classes})",
    ]
    return "\n".join(lines)


def _example(inputs: Mapping[str, Any]) -> str:
    """Return what the examples are, for a comment in the code."""
    if "features" in inputs:
        return "[n, features] in the order of inputs['features']"
    return "[n, channels, height, width], bytes divided by 255" if len(inputs["input_shape"]) == 3 else "one per row"


def _is_built_in(model: Mapping[str, Any]) -> bool:
    """Return whether fedkeep can build a model from its table."""
    name = model.get("name")
    return name in models.REGISTRY and set(model) - {"name"} <= set(models.options(str(name)))


def _options(model: Mapping[str, Any]) -> str:
    return "".join(f", {key}={value!r}" for key, value in model.items() if key != "name")


def _building(model: Mapping[str, Any], source: str) -> str:
    """Return the code that builds the model, if model and data have names; otherwise a place to fill in."""
    if not _is_built_in(model) or not re.fullmatch(r"[a-z0-9-]+", source):
        return "model = ...  # the network that was trained"
    shape = f"data.input_shape, data.n_classes{_options(model)}"
    return f"data = fk.data.load({source!r})\nmodel = fk.models.build({model['name']!r}, {shape})"


def _loading(model: Mapping[str, Any]) -> str:
    """Return the code that loads the weights; a model with frozen parts finds only the others in the file."""
    if model.get("name") in models.REGISTRY and model.keys() == {"name"} and model["name"] not in models.TEXT_MODELS:
        return f"model.load_state_dict(load_file({WEIGHTS!r}))"
    return f"model.load_state_dict(load_file({WEIGHTS!r}), strict=False)  # frozen weights are not in the file"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_numbers(value: Any) -> bool:
    """Return whether a value is a finite number, or (nested) lists of such."""
    if isinstance(value, list):
        return bool(value) and all(map(_are_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
