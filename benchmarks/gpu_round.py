"""Time of FedNTD's CIFAR-10 round on a GPU: 10 of 100 clients, 5 epochs, batch size 50, its CNN, one evaluation.

    python benchmarks/gpu_round.py [--rounds 10] [--whole 200] [--methods all]

The images are random bytes of CIFAR-10's shape; their content does not affect the time. Every line is the median of
several rounds after three warm-up rounds. `resnet8` is FedGKD's round: 4 of 20 clients, 20 epochs, batch size 64. The
last lines are complete runs of the command line, from start-up to the end, with augmentation, a test after every round
and a run folder.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import fedkeep as fk

BATCH, EPOCHS, LR, MOMENTUM, DECAY = 50, 5, 0.01, 0.9, 1e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "loop, TF32": {"engine": "loop"},
    "stacked, float32": {"tf32": False},
    "stacked, TF32": {},
    "stacked, bfloat16": {"autocast": "bfloat16"},
    "stacked, TF32, augmented": {"augment": fk.data.Augment(crop=4, flip=True, cutout=16)},
}
EXPERIMENT = """
method = "fedntd"
model = "cnn_fedntd"

[data]
source = "{images}"

[split]
kind = "shards"
n_clients = 100
s = 2

[train]
rounds = {rounds}
participation = 10
device = "cuda"
engine = "stacked"

[train.augment]
crop = 4
flip = true
cutout = 16
"""


def problem(public: bool = False) -> tuple[fk.data.Dataset, fk.data.Partition]:
    """Make the data and the partition."""
    x = np.random.default_rng(0).integers(0, 256, size=(50_000, 3, 32, 32), dtype=np.uint8)
    y = np.arange(50_000) % 10
    data = fk.data.from_arrays(x, y, x[:10_000], y[:10_000], mean=[0.49, 0.48, 0.45], std=[0.25, 0.24, 0.26])
    if public:
        data = data.with_public(112, validation=0.25)
    return data, fk.data.partition.shards(data.y_train, n_clients=100, s=2, seed=0)


def plain_script(data: fk.data.Dataset, clients: fk.data.Partition) -> Callable[[], None]:
    """Return a round as a researcher would write it: client after client, data on the GPU, torch.optim, TF32."""
    model = fk.models.build("cnn_fedntd", (3, 32, 32), 10).cuda()
    mean, std = (torch.tensor(v, device="cuda").view(3, 1, 1) for v in ([0.49, 0.48, 0.45], [0.25, 0.24, 0.26]))
    x, y = (data.x_train.cuda() / 255 - mean) / std, data.y_train.cuda()
    x_test, y_test = (data.x_test.cuda() / 255 - mean) / std, data.y_test.cuda()
    rng = np.random.default_rng(0)

    def train(own: torch.Tensor, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        local, teacher = (fk.models.build("cnn_fedntd", (3, 32, 32), 10).cuda() for _ in range(2))
        local.load_state_dict(weights), teacher.load_state_dict(weights)
        optimizer = torch.optim.SGD(local.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY)
        for _ in range(EPOCHS):
            for at in own[torch.randperm(len(own), device="cuda")].split(BATCH):
                optimizer.zero_grad()
                z = local(x[at])
                with torch.no_grad():
                    z_g = teacher(x[at])
                others = torch.ones_like(z, dtype=torch.bool).scatter_(1, y[at][:, None], False)
                q_l = F.log_softmax(z[others].view(len(at), 9), 1)
                q_g = F.softmax(z_g[others].view(len(at), 9), 1)
                loss = F.cross_entropy(z, y[at]) + F.kl_div(q_l, q_g, reduction="batchmean")
                loss.backward()
                optimizer.step()
        return local.state_dict()

    def step() -> None:
        weights = model.state_dict()
        cohort = rng.choice(100, 10, replace=False)
        states = [train(torch.from_numpy(clients[int(k)].astype(np.int64)).cuda(), weights) for k in cohort]
        model.load_state_dict({name: sum(one[name] for one in states) / 10 for name in weights})
        with torch.no_grad():
            hits = sum(
                int((model(a).argmax(1) == b).sum())
                for a, b in zip(x_test.split(1000), y_test.split(1000), strict=True)
            )
        assert hits >= 0

    return step


def timed(step: Callable[[], Any], rounds: int) -> str:
    """Time rounds, and format their median and range."""
    for _ in range(3):
        step()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return f"{statistics.median(seconds) * 1e3:7.1f} ms ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"


def simulation(method: str, **changes: Any) -> fk.Simulation:
    """Set up fedkeep."""
    settings = {"rounds": 10**6, "participation": 10, "engine": "stacked", "device": "cuda", **changes}
    needs = method in ("fedgkd_vote", "fedssd", "fedcad", "flashback", "fedka", "feddf", "fedavg_finetune")
    return fk.Simulation(method, "cnn_fedntd", *problem(public=needs), fk.Settings(**settings))


def resnet8(**changes: Any) -> fk.Simulation:
    """Set up FedGKD's round with ResNet-8 and GroupNorm."""
    data, _ = problem()
    clients = fk.data.partition.dirichlet(data.y_train, n_clients=20, alpha=1.0, seed=0)
    settings = {"rounds": 10**6, "participation": 4, "epochs": 20, "batch_size": 64, "lr": 0.05, "device": "cuda"}
    return fk.Simulation("fedgkd", "resnet8", data, clients, fk.Settings(**{**settings, **changes}))


def whole_run(rounds: int, folder: Path) -> float:
    """Run the command line once; return the seconds."""
    data, _ = problem()
    arrays = {name: getattr(data, name).numpy() for name in ("x_train", "y_train", "x_test", "y_test", "mean", "std")}
    np.savez(folder / "images.npz", **arrays)
    (folder / "run.toml").write_text(EXPERIMENT.format(images=folder / "images.npz", rounds=rounds))
    began = time.perf_counter()
    command = [sys.executable, "-m", "fedkeep", "run", str(folder / "run.toml"), "--runs", str(folder / "runs")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Print a line for every variant, method and complete run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--whole", type=int, default=200, help="rounds of the complete runs; 0: none")
    parser.add_argument("--methods", default="all")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms per round, median of {args.rounds}")
    torch.set_float32_matmul_precision("high")
    print(f"  {'plain script, TF32':<26} {timed(plain_script(*problem()), 3)}", flush=True)
    torch.set_float32_matmul_precision("highest")
    for name, changes in VARIANTS.items():
        rounds = 3 if changes.get("engine") == "loop" else args.rounds
        print(f"  {name:<26} {timed(simulation('fedntd', **changes).step, rounds)}", flush=True)
    print("every method, stacked, TF32")
    for name in list(fk.methods.REGISTRY) if args.methods == "all" else filter(None, args.methods.split(",")):
        print(f"  {name:<26} {timed(simulation(name).step, 3)}", flush=True)
    if args.methods:
        print(f"  {'resnet8, fedgkd':<26} {timed(resnet8().step, 3)}", flush=True)
    for _ in range(2 if args.whole else 0):
        with tempfile.TemporaryDirectory() as folder:
            seconds = whole_run(args.whole, Path(folder))
        print(f"  {args.whole} rounds of FedNTD from the command line: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
