"""How many runs of a sweep or a table run at a time."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from fedkeep._util.validate import require_whole
from fedkeep.engine.distributed import current_ranks
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment

Jobs = int | Literal["auto"]

# Measured with benchmarks/gpu_jobs.py. Without MPS, kernels of different processes take turns on a GPU.
RUNS_PER_GPU, RUNS_PER_GPU_WITH_MPS = 3, 6


def resolve_jobs(jobs: Jobs, experiments: Collection[Experiment]) -> int:
    """Return how many of these runs to run at a time: the given number, or what is best where `auto` is given.

    `auto` is 1 on a CPU, whose cores a run can use by itself, 3 on a GPU, and 6 on a GPU shared by NVIDIA MPS.
    """
    ranks = current_ranks().size
    if jobs == "auto":
        on_gpu = ranks == 1 and all(_on_gpu(experiment) for experiment in experiments)
        best = (RUNS_PER_GPU_WITH_MPS if nvidia_mps_runs() else RUNS_PER_GPU) if on_gpu else 1
        return max(1, min(best, len(experiments)))
    require_whole("jobs", jobs, low=1)
    if jobs > 1 and ranks > 1:
        raise FedkeepError(
            "several runs at a time (--jobs) and several processes per run (torchrun) cannot be combined",
            key="jobs",
            value=jobs,
        )
    return jobs


def nvidia_mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service runs on this machine.

    Its control file is in the folder that CUDA_MPS_PIPE_DIRECTORY names, or in NVIDIA's default folder.
    """
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _on_gpu(experiment: Experiment) -> bool:
    """Return whether a run would use a GPU; without using one, which would take memory on it."""
    name = experiment.train.device
    return torch.cuda.is_available() if name == "auto" else name.startswith("cuda")
