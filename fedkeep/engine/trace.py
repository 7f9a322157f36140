"""What a trace of torch's profiler shows: the time of each part of a round, and of each operation.

A trace is a list of events with a start (`ts`) and a duration (`dur`) in microseconds. On a CPU an operation's time is
its own, without the operations that it calls. On a GPU it is that of its kernels, and a kernel belongs to the part of
the round in which it was launched, however much later it ran. Time in which several kernels ran counts for the first.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedkeep.engine.recording import Recording
from fedkeep.engine.round_parts import PREFIX

Event = Mapping[str, Any]

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NO_PART, _IDLE = "rest", "GPU idle"
ROUND_END = "fedkeep, end of round "  # and its number: an event of its own in a trace


class Row(NamedTuple):
    """One line of a profile. Calls and milliseconds are those of one round; the share is of the round's time."""

    name: str
    calls: float
    ms: float
    share: float


class Summary(NamedTuple):
    """What a trace shows of a round: its parts and its operations, longest first."""

    ms: float  # of a round, while it was profiled
    gpu_ms: float | None  # of a round in which the GPU was busy; None without a GPU
    parts: list[Row]
    operations: list[Row]


def read_events(written: bytes) -> list[Event]:
    """Return those events of a trace in Chrome's format that have a duration."""
    return [event for event in json.loads(written)["traceEvents"] if event.get("ph") == "X"]


def complete_rounds(events: Sequence[Event]) -> list[Event]:
    """Return the events up to the end of the last complete round."""
    ends = [e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(ROUND_END)]
    return [e for e in events if e["ts"] <= max(ends)] if ends else []


def summarise(events: Iterable[Event], rounds: int, seconds: float, unused: Collection[str] = ()) -> Summary:
    """Return what the events of some rounds show; `seconds` is how long these rounds took.

    The parts in `unused` are not shown: their time belongs to the part around them, or to the rest.
    """
    events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    marked = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)]
    parts = [e for e in marked if _part_name(e) not in unused]
    work = [e for e in events if e.get("cat") in _ON_GPU]
    total = seconds * 1e6
    if work:
        times = list(_times_alone(work))
        gpu_us: float | None = sum(times)
        other = (_IDLE, total - sum(times))
        spent = [*zip(_launched_in(work, events, parts), times, strict=True), other]
        operations = [(kernel_name(e["name"]), time) for e, time in zip(work, times, strict=True)]
    else:
        gpu_us, threads = None, {e["tid"] for e in parts}
        spent = [(_part_name(e), time) for e, time in _own_times(parts)]
        called = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] in threads]
        operations = [(operation_name(e["name"]), time) for e, time in _own_times(called)]
        spent.append((_NO_PART, total - sum(time for _, time in spent)))
        other = ("Python, outside of operations", total - sum(time for _, time in operations))
    calls = {name: number for name, number, _ in _totals((_part_name(e), 0.0) for e in parts)}
    by_part = [Row(name, calls.get(name, 0) / rounds, us / rounds / 1e3, us / total) for name, _, us in _totals(spent)]
    rows = [Row(name, n / rounds, us / rounds / 1e3, us / total) for name, n, us in _totals(operations)]
    rows.append(Row(other[0], 0, other[1] / rounds / 1e3, other[1] / total))
    return Summary(
        total / rounds / 1e3,
        None if gpu_us is None else gpu_us / rounds / 1e3,
        sorted(by_part, key=lambda row: (row.name in (_NO_PART, _IDLE), -row.ms)),
        sorted(rows, key=lambda row: -row.ms),
    )


def format_summary(summary: Summary, most: int = 10) -> str:
    """Format the parts of a round and its largest operations as two tables of plain text."""
    where = "GPU" if summary.gpu_ms is not None else "CPU"
    lines = [*_table("part of a round", summary.parts), ""]
    left_out = summary.operations[most:]
    lines += _table(f"operation ({where})", summary.operations[:most])
    if left_out:
        names = f"{len(left_out)} smaller ones"
        lines.append(_line(names, "", sum(row.ms for row in left_out), sum(row.share for row in left_out)))
    return "\n".join(lines)


def operation_name(name: str) -> str:
    """Return the name of an operation without torch's prefixes.

    >>> operation_name("aten::bmm"), operation_name("autograd::engine::evaluate_function: BmmBackward0")
    ('bmm', 'BmmBackward0 (autograd)')
    >>> operation_name("BmmBackward0"), operation_name("run")
    ('BmmBackward0 (autograd)', 'replayed step (TorchScript)')
    """
    if name == Recording.run.__name__:  # as TorchScript calls it
        return "replayed step (TorchScript)"
    name = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")
    return f"{name} (autograd)" if re.fullmatch(r"\w+Backward\d+", name) else name


def kernel_name(name: str) -> str:
    """Return the name of a kernel without its namespaces.

    >>> kernel_name("void at::native::(anonymous namespace)::fill<float, at::native::Ops<4> >(int)")
    'fill<float, Ops<4> >(int)'
    """
    return re.sub(r"\(anonymous namespace\)::|\b\w+::", "", name.removeprefix("void "))


def _own_times(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with its time without the events inside it on the same thread; `events` are in order of start.

    >>> outer, inner = {"tid": 1, "ts": 0, "dur": 10}, {"tid": 1, "ts": 2, "dur": 3}
    >>> [time for _, time in _own_times([outer, inner])]
    [7.0, 3.0]
    """
    own = [float(e["dur"]) for e in events]
    open_events: dict[Any, list[int]] = {}
    for i, event in enumerate(events):
        stack = open_events.setdefault(event["tid"], [])
        while stack and _end(events[stack[-1]]) <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= event["dur"]
        stack.append(i)
    yield from zip(events, own, strict=True)


def _launched_in(work: Iterable[Event], events: Iterable[Event], parts: Sequence[Event]) -> list[str]:
    """Return of each kernel the part in which it was launched."""
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "args" in e}
    starts = [event["ts"] for event in parts]

    def part_of(kernel: Event) -> str:
        launch = launched.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            return _NO_PART
        for event in reversed(parts[: bisect.bisect_right(starts, launch["ts"])]):
            if launch["ts"] < _end(event):
                return _part_name(event)
        return _NO_PART

    return [part_of(kernel) for kernel in work]


def _times_alone(events: Iterable[Event]) -> Iterator[float]:
    """Yield each event's time without the time of earlier ones; `events` are in order of start.

    >>> list(_times_alone([{"ts": 0, "dur": 10}, {"ts": 5, "dur": 8}, {"ts": 6, "dur": 1}]))
    [10.0, 3.0, 0.0]
    """
    until = 0.0
    for event in events:
        yield max(0.0, _end(event) - max(until, event["ts"]))
        until = max(until, _end(event))


def _totals(items: Iterable[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """Return (name, number, sum) for each name."""
    totals: dict[str, list[float]] = {}
    for name, value in items:
        total = totals.setdefault(name, [0, 0.0])
        total[0] += 1
        total[1] += value
    return [(name, int(number), value) for name, (number, value) in totals.items()]


def _part_name(event: Event) -> str:
    return str(event["name"]).removeprefix(PREFIX)


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _table(title: str, rows: Iterable[Row]) -> list[str]:
    lines = [f"{title:<48} {'calls per round':>15} {'ms per round':>12} {'share':>6}"]
    return lines + [_line(row.name, f"{row.calls:.0f}" if row.calls else "", row.ms, row.share) for row in rows]


def _line(name: str, calls: str, ms: float, share: float) -> str:
    name = name if len(name) <= 46 else f"{name[:45]}…"
    return f"  {name:<46} {calls:>15} {ms:>12.2f} {share:>6.1%}"
