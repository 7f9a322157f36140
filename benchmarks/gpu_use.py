"""Share of the time in which the GPU is busy: of a plain loop over clients, of fedkeep, or of any command.

    python benchmarks/gpu_use.py [--rounds 5]           FedNTD's CIFAR-10 round, as in gpu_round.py
    python benchmarks/gpu_use.py -- python main.py ...  any program, while it runs

The first form counts the time in which at least one kernel ran, by torch's profiler, and divides it by the time of a
round without the profiler, which slows the host down. The second form starts the program and asks nvidia-smi again and
again; its utilisation has the same meaning, over the last fraction of a second. Neither says how much of the GPU a
kernel uses: a busy GPU may still be mostly empty.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]


def refuse(reason: str) -> NoReturn:
    """End with a message of one line."""
    print(f"gpu_use: {reason}", file=sys.stderr)
    sys.exit(2)


def utilisation() -> list[float]:
    """Return what nvidia-smi says of every GPU now, in percent."""
    if shutil.which(QUERY[0]) is None:
        refuse("nvidia-smi is not available: it comes with NVIDIA's driver")
    done = subprocess.run(QUERY, capture_output=True, text=True, check=False)
    try:
        return [float(line) for line in done.stdout.split()]
    except ValueError:
        refuse(f"nvidia-smi reports no utilisation: {' '.join((done.stdout + done.stderr).split())[:200]}")


def watch(command: Sequence[str], seconds: float) -> None:
    """Run a command and print the utilisation of every GPU while it ran; exit as the command did."""
    utilisation()
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        refuse(f"{command[0]} cannot be started: {error.strerror}")
    samples: list[list[float]] = []
    while process.poll() is None:
        samples.append(utilisation())
        time.sleep(seconds)
    for number, values in enumerate(zip(*samples, strict=True)):
        idle = sum(value == 0 for value in values) / len(values)
        mean = statistics.fmean(values)
        print(f"GPU {number}: busy {mean:.0f}% of the time, idle in {idle:.0%} of {len(values)} samples")
    sys.exit(process.returncode)


def measure(step: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the seconds of a round, and the seconds of it in which the GPU was busy."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from fedkeep.engine import trace

    def run() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    seconds = run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        profiled = run()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        summary = trace.summarise(trace.read_events(Path(folder, "trace.json").read_bytes()), rounds, profiled)
    return seconds / rounds, (summary.gpu_ms or 0.0) / 1e3


def compare(rounds: int) -> None:
    """Print the share of a plain loop, of fedkeep's loop and of its stacked engine."""
    import torch

    if not torch.cuda.is_available():
        refuse("torch finds no CUDA device: run this on a machine with a GPU, with a CUDA build of torch")
    from gpu_round import plain_script, problem, simulation

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; FedNTD's CIFAR-10 round, {rounds} rounds each")
    torch.set_float32_matmul_precision("high")
    steps = {
        "plain loop over clients": plain_script(*problem()),
        "fedkeep, loop": simulation("fedntd", engine="loop").step,
        "fedkeep, stacked": simulation("fedntd").step,
    }
    for name, step in steps.items():
        seconds, busy = measure(step, rounds)
        times = f"{1e3 * seconds:8.1f} ms per round, GPU busy for {1e3 * busy:7.1f} ms of it"
        print(f"  {name:<24} {times}: {busy / seconds:4.0%}")


def main() -> None:
    """Compare the engines, or watch a command."""
    arguments = sys.argv[1:]
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two questions to nvidia-smi")
    args = parser.parse_args(own)
    if "--" in arguments and not command:
        refuse("no command follows --")
    if command:
        watch(command, args.interval)
    compare(args.rounds)


if __name__ == "__main__":
    main()
