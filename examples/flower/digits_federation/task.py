"""The model and the data. Replace them by your own."""

import dataclasses

import torch
from flwr.app import Context

import fedkeep as fk


def model() -> torch.nn.Module:
    """Return the model: any nn.Module from inputs to logits, without running averages of BatchNorm."""
    return fk.models.build("mlp", (1, 8, 8), 10)


def node_data(context: Context) -> fk.data.Dataset:
    """Return this node's own examples, as (x, y) or as the training part of a data set.

    Here every node has a part of scikit-learn's digits, with only some of the ten digits. A real node reads its own
    files: `return fk.data.load(str(context.node_config["data"]))`.
    """
    data = fk.data.load("digits", public=0.1)
    clients = int(context.run_config["num-clients"])
    split = fk.data.partition.shards(data.y_train, n_clients=clients, s=max(2, 10 // clients), seed=0)
    mine = split[int(context.node_config["client-id"])]
    return dataclasses.replace(data, x_train=data.x_train[mine], y_train=data.y_train[mine])


def server_data() -> fk.data.Dataset:
    """Return the server's test data, with a public part that some methods need."""
    return fk.data.load("digits", public=0.1)
