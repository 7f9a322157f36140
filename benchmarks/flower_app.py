"""FedNTD as a Flower app in Flower's own simulation: the Flower part of flower_simulation.py.

    python benchmarks/flower_app.py JOB

It needs Flower and torch, not fedkeep. flower_simulation.py starts it with the JOB (JSON) and reads its result.
`run_simulation` is deprecated in favour of `flwr run`, which runs the same simulation inside a SuperLink. Without a
SuperLink less has to be started, which favours Flower. The rounds run the same code.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

client = ClientApp()


def network() -> torch.nn.Module:
    """Build the MLP 64-64-10."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


@functools.cache
def load(folder: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Read the examples and the partition, once in each worker process; torch uses one thread there."""
    torch.set_num_threads(1)
    with np.load(Path(folder) / "federation.npz") as file:
        own = torch.from_numpy(file["indices"]).long().split(np.diff(file["offsets"]).tolist())
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"]), list(own)


def train_locally(model: torch.nn.Module, x: Tensor, y: Tensor, config: ConfigRecord) -> None:
    """Train with FedNTD's loss. The received model's outputs are computed once, because they do not change."""
    others = torch.ones(len(y), 10, dtype=torch.bool).scatter_(1, y[:, None], False).nonzero()[:, 1].view(-1, 9)
    with torch.no_grad():
        q_g = F.softmax(copy.deepcopy(model)(x).gather(1, others), 1)
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=config["momentum"])
    for _ in range(config["epochs"]):
        for batch in torch.randperm(len(y)).split(config["batch"]):
            optimizer.zero_grad()
            z = model(x[batch])
            q_l = F.log_softmax(z.gather(1, others[batch]), 1)
            loss = F.cross_entropy(z, y[batch]) + F.kl_div(q_l, q_g[batch], reduction="batchmean")
            loss.backward()
            optimizer.step()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    began = time.perf_counter()
    config = message.content["config"]
    x, y, owned = load(config["folder"])
    own = owned[context.node_config["partition-id"]]
    torch.manual_seed(1000 * config["server-round"] + context.node_config["partition-id"])
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_locally(model, x[own], y[own], config)
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(own), "seconds": time.perf_counter() - began})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def total_seconds(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the total time that the clients trained."""
    return MetricRecord({"seconds": sum(reply["metrics"]["seconds"] for reply in replies)})


class Timed(FedAvg):
    """Flower's FedAvg with times. A failed client ends the run, because it would make the round too fast."""

    def __init__(self, clients: int) -> None:
        nodes = {"min_train_nodes": clients, "min_available_nodes": clients}
        super().__init__(fraction_evaluate=0.0, train_metrics_aggr_fn=total_seconds, **nodes)
        self.clients = clients
        self.began: list[float] = []

    def configure_train(self, *args: Any) -> Iterable[Message]:
        """Record the start of the round, which is the end of the one before."""
        self.began.append(time.time())
        return super().configure_train(*args)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average the clients' models, all of them."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) < self.clients:
            raise RuntimeError(f"{len(replies) - len(failed)} of {self.clients} clients replied; {failed[:1]}")
        return super().aggregate_train(server_round, replies)


def main(job: dict[str, Any]) -> None:
    """Run the federation, and write its times and its model to the job's folder."""
    folder = Path(job["folder"])
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        with np.load(folder / "model.npz") as file:
            model = dict(zip(network().state_dict(), map(torch.from_numpy, file.values()), strict=True))
        strategy = Timed(job["clients"])
        config = ConfigRecord({"folder": str(folder), **job["training"]})
        result = strategy.start(grid, ArrayRecord(model), num_rounds=job["rounds"], train_config=config)
        times = [*strategy.began, time.time()]
        busy = [metrics["seconds"] for metrics in result.train_metrics_clientapp.values()]
        np.savez(folder / "trained.npz", *result.arrays.to_numpy_ndarrays())
        (folder / "times.json").write_text(json.dumps({"times": times, "busy": busy}))

    resources = {"num_cpus": job["client_cpus"], "num_gpus": 0.0}
    init = {"num_cpus": job["cpus"], "object_store_memory": 2**28}  # Ray's default, 30% of memory, may exceed /dev/shm
    backend = {"client_resources": resources, "init_args": init}
    run_simulation(server, client, num_supernodes=job["clients"], backend_config=backend)


if __name__ == "__main__":
    import flower_app  # by name, so that Flower's workers import it once instead of receiving it with every message

    flower_app.main(json.loads(sys.argv[1]))
