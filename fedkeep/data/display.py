"""How data sets and partitions are shown: one line as text, and a small picture in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep._util import html
from fedkeep._util.text import list_some, printable
from fedkeep._util.text_form import TextForm

if TYPE_CHECKING:
    from fedkeep.data.client_indices import Partition
    from fedkeep.data.dataset import Dataset

_MOST_NAMES = 6


def describe_dataset(data: Dataset) -> str:
    """Return a data set in one line: its name, how many examples, of what form, and its classes."""
    shape = data.input_shape
    kind = f"texts of up to {shape.max_length} tokens" if isinstance(shape, TextForm) else f"examples of shape {shape}"
    if shape == ():
        kind = f"examples with {list_some([str(key) for key in data.x_train], _MOST_NAMES)}"
    names = f" ({list_some([printable(name) for name in data.class_names], _MOST_NAMES)})" if data.class_names else ""
    owners = "" if data.ids is None else f", {len(np.unique(data.ids))} owners"
    public = "" if data.public is None else f", public set of {len(data.public.y) + len(data.public.y_val)}"
    return (
        f"{printable(data.name)}: {len(data.y_train)} training and {len(data.y_test)} test {kind}, "
        f"{data.n_classes} classes{names}{owners}{public}"
    )


def describe_partition(clients: Partition) -> str:
    """Return a partition in one line: how many clients, and the sizes of their data."""
    sizes = clients.sizes
    names = f" ({list_some(list(map(str, clients.owners)), _MOST_NAMES)})" if clients.owners is not None else ""
    held = "" if clients.held is None else f", {len(clients.held.indices)} more held out"
    sizes_text = f"{sizes.min()} to {sizes.max()} examples (median {np.median(sizes):g})"
    return f"{len(clients)} clients{printable(names)} with {sizes_text}{held}"


def dataset_html(data: Dataset) -> str:
    """Return a data set for a notebook: one line, and the number of examples of each class."""
    parts = {"training": data.y_train, "test": data.y_test}
    if data.public is not None:
        parts["public"] = data.public.y
    labels = {part: np.asarray(y) for part, y in parts.items()}
    pieces = [html.paragraph(describe_dataset(data).partition(": ")[2])]
    if all(_are_classes(y, data.n_classes) for y in labels.values()):
        counts = np.stack([np.bincount(y, minlength=data.n_classes) for y in labels.values()])
        names = data.class_names or tuple(str(c) for c in range(data.n_classes))
        pieces.append(html.heat_map(counts, list(labels), names, ("part", "class"), counts=True))
    return html.block(f"Data set {data.name}", *pieces)


def partition_html(clients: Partition, y: Any = None, class_names: tuple[str, ...] | None = None) -> str:
    """Return a partition for a notebook: one line, and the examples of each client and class if labels are known."""
    y = clients.labels if y is None else np.asarray(y)
    pieces = [html.paragraph(describe_partition(clients))]
    if y is not None and _are_classes(y, 2**16):
        counts = clients.label_counts(y, len(class_names) if class_names else None)
        names = class_names or tuple(str(c) for c in range(counts.shape[1]))
        rows = [clients.name(k) for k in range(len(clients))]
        pieces.append(html.heat_map(counts, rows, names, ("client", "class"), counts=True))
    else:
        pieces.append(html.paragraph("clients.heat_map(data) shows which classes they have"))
    return html.block("Partition", *pieces)


def _are_classes(y: np.ndarray, n_classes: int) -> bool:
    """Return whether labels are classes that can be counted."""
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer):
        return False
    return bool(y.min() >= 0 and y.max() < n_classes)
