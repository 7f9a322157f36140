"""Mapping a function over clients: one client, `vmap` over a stack, or one CUDA stream each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fedkeep import tree

Each = Callable[..., Any]  # each(function, *trees): call the function for every client


def call_one(fn: Callable[..., Any], *trees: Any) -> Any:
    """Call a function for one client; the trees have no client axis."""
    return fn(*trees)


def map_clients(fn: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leading client axis of every tree, by `vmap`. Random numbers belong in the plan."""
    return torch.vmap(fn, randomness="error")(*trees)


def one_stream_each(fn: Callable[..., Any], *trees: Any) -> Any:
    """Call a function for one stacked client after another; on a GPU each has its own stream, so that they overlap.

    For modules that `vmap` does not support. Random numbers that they draw would not be tied to a client's seed.
    """
    split = [tree.map(lambda t: t.unbind(0), one) for one in trees]
    first = next(leaf for one in trees for leaf in tree.leaves(one))
    clients, device = len(first), first.device

    def call(k: int) -> Any:
        return fn(*(tree.map(lambda ts: ts[k], one) for one in split))

    if device.type == "cuda":
        main, results = torch.cuda.current_stream(device), []
        for k in range(clients):
            stream = _stream(device, k)
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(call(k))
        for k in range(clients):
            main.wait_stream(_stream(device, k))
    else:
        results = [call(k) for k in range(clients)]
    if isinstance(results[0], tuple):
        return tuple(tree.stack(parts) for parts in zip(*results, strict=True))
    return tree.stack(results)


@functools.cache
def _stream(device: torch.device, k: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
