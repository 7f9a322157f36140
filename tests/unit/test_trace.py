"""What is read out of a trace, with events whose sums are easy to see."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeep.engine.trace import ROUND_END, Row, complete_rounds, format_summary, read_events, summarise


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def part(name: str, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"fedkeep: {name}", ts, dur)


def test_on_a_cpu_an_operation_has_its_own_time_only() -> None:
    events = [
        part("local steps", 0, 6000),
        event("cpu_op", "aten::linear", 1000, 3000),
        event("cpu_op", "aten::addmm", 1500, 2000),
        event("cpu_op", "aten::addmm", 4500, 500),
        part("writing", 7000, 1000),
        event("cpu_op", "aten::sum", 0, 9000, tid=2),  # another thread
        event("user_annotation", "of another library", 0, 9000),
    ]
    found = summarise(reversed(events), rounds=2, seconds=0.010)
    assert (found.ms, found.gpu_ms) == (5.0, None)
    assert found.parts == [Row("local steps", 0.5, 3.0, 0.6), Row("writing", 0.5, 0.5, 0.1), Row("rest", 0, 1.5, 0.3)]
    assert found.operations == [
        Row("Python, outside of operations", 0, 3.25, 0.65),
        Row("addmm", 1.0, 1.25, 0.25),
        Row("linear", 0.5, 0.5, 0.1),
    ]


def test_on_a_gpu_a_kernel_belongs_to_the_part_that_launched_it() -> None:
    events = [
        part("local steps", 0, 100),
        part("test of the global model", 100, 100),
        event("cuda_runtime", "cudaGraphLaunch", 50, 5, correlation=7),  # two kernels of one graph
        event("kernel", "void at::native::gemm<float>(int)", 120, 400, tid=20, correlation=7),
        event("kernel", "relu", 520, 100, tid=20, correlation=7),
        event("cuda_runtime", "cudaLaunchKernel", 150, 5, correlation=8),
        event("kernel", "relu", 570, 100, tid=21, correlation=8),  # on another stream, half of it at the same time
        event("gpu_memcpy", "Memcpy DtoH", 700, 50, tid=20, correlation=9),  # its launch is not in the trace
        event("gpu_user_annotation", "fedkeep: local steps", 120, 500, tid=20),
        event("cpu_op", "aten::relu", 140, 20),
    ]
    found = summarise(events, rounds=1, seconds=0.001)
    assert found.gpu_ms == pytest.approx(0.6)
    assert found.parts == [
        Row("local steps", 1, 0.5, 0.5),
        Row("test of the global model", 1, 0.05, 0.05),  # the rest of its kernel's time has been counted
        Row("GPU idle", 0, 0.4, 0.4),
        Row("rest", 0, 0.05, 0.05),
    ]
    assert sum(row.share for row in found.parts) == pytest.approx(1)
    assert [(row.name, row.calls, row.ms) for row in found.operations] == [
        ("gemm<float>(int)", 1, pytest.approx(0.4)),
        ("GPU idle", 0, pytest.approx(0.4)),
        ("relu", 2, pytest.approx(0.15)),
        ("Memcpy DtoH", 1, pytest.approx(0.05)),
    ]


def test_the_table_lists_the_largest_and_the_sum_of_the_others() -> None:
    events = [part("local steps", 0, 1000)]
    events += [event("cpu_op", f"aten::op{i}", 10 * i, i) for i in range(1, 10)]
    lines = format_summary(summarise(events, rounds=1, seconds=0.001), most=3).splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "part",
        "local",
        "rest",
        "operation",
        "Python,",
        "op9",
        "op8",
        "7",
    ]
    assert lines[-1].split() == ["7", "smaller", "ones", "0.03", "2.8%"]


def test_a_long_name_is_cut_and_events_without_duration_are_left_out() -> None:
    written = b'{"traceEvents": [{"ph": "M", "name": "process_name"}, {"ph": "X", "name": "a", "ts": 1, "dur": 2}]}'
    assert [each["name"] for each in read_events(written)] == ["a"]
    events = [part("p", 0, 10), event("cpu_op", "x" * 100, 0, 5)]
    assert max(map(len, format_summary(summarise(events, 1, 1e-5)).splitlines())) <= 86


def test_parts_that_are_not_used_belong_to_what_is_around_them() -> None:
    events = [part("other work of a visit", 0, 600), part("notes", 100, 200), part("prepare", 700, 100)]
    found = summarise(events, rounds=1, seconds=0.001, unused={"notes", "prepare"})
    assert found.parts == [Row("other work of a visit", 1, 0.6, 0.6), Row("rest", 0, 0.4, 0.4)]


def test_a_round_that_is_not_complete_is_left_out() -> None:
    ends = [event("user_annotation", f"{ROUND_END}{i}", 100.0 * i, 1) for i in (1, 2)]
    events = [part("local steps", 50.0 * i, 10) for i in range(6)]
    assert [e["ts"] for e in complete_rounds([*events, *ends])] == [0, 50, 100, 150, 200, 100, 200]
    assert complete_rounds(events) == []
