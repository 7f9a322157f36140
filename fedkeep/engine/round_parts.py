"""Parts of a round, as torch's profiler shows them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fedkeep._util.private_apis import profiler_enabled
from fedkeep.method import FedAvg

PREFIX = "fedkeep: "
# what the stages of a visit are called in a profile; the others have the names of their hooks
_STAGES = {
    "annotate": "notes",
    "select_examples": "selection of examples",
    "rehearse": "rehearsal",
    "local training": "local steps",
    "the visit": "other work of a visit",
}
# hooks that do nothing unless a method has its own
_OPTIONAL = ("prepare", "annotate", "select_examples", "rehearse", "measure")


def round_part(name: str) -> AbstractContextManager[object]:
    """Mark a part of a round in the traces of torch's profiler; without a profiler nothing happens."""
    return record_function(PREFIX + name) if profiler_enabled() else nullcontext()


def visit_part(stage: str) -> AbstractContextManager[object]:
    """Mark a stage of a visit, or of the visits of a stack of clients."""
    return round_part(_STAGES.get(stage, stage))


def unused_parts(method: FedAvg) -> set[str]:
    """Return the parts in which nothing happens, because the method does not use their hooks."""
    return {_STAGES.get(hook, hook) for hook in _OPTIONAL if not method.uses(hook)}
