"""Search for the tile sizes of the convolution kernels on a GPU.

    python benchmarks/kernel_tiles.py [--processes 14] [--best 4]

For the convolutions of FedNTD's CNN (10 clients, batch 50) and of ResNet-8 (4 clients, batch 64), every candidate is
compiled, in parallel, and timed by replaying a CUDA graph of 20 launches; the best are printed next to the tile that
`fedkeep.engine.gpu.kernels.tiles` chooses. The data are random; their content does not affect the time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

LAUNCHES, REPEATS = 20, 4


@dataclass(frozen=True)
class Layer:
    """A convolution: clients, images, input and output channels, size of the image and of the window."""

    clients: int
    images: int
    channels: int
    outputs: int
    size: int
    window: int
    pool: bool


LAYERS = {
    "cnn, layer 1": Layer(10, 50, 3, 32, 32, 5, True),
    "cnn, layer 2": Layer(10, 50, 32, 64, 16, 5, True),
    "resnet8, stage 1": Layer(4, 64, 16, 16, 32, 3, False),
    "resnet8, stage 2": Layer(4, 64, 32, 32, 16, 3, False),
    "resnet8, stage 3": Layer(4, 64, 64, 64, 8, 3, False),
}
WORK = ("forward", "gradient of the input", "gradient of the weights")


def candidates(layer: Layer, work: str) -> Iterator[Any]:
    """Yield the tiles to try: those whose accumulators fit into registers and whose factors fit into shared memory."""
    from fedkeep.engine.gpu.kernels.tiles import Tile, tile_size

    outputs = layer.channels if work == "gradient of the input" else layer.outputs
    BO = tile_size(outputs, 64)
    if work == "gradient of the weights":
        for BM, BK, warps, stages, programs in itertools.product(
            (16, 32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3), (264, 528)
        ):
            if 128 * 32 * warps >= BK * BO:
                yield Tile(BM, BK, BO, warps, stages, programs)
        return
    tiles = 4 if layer.pool and work == "forward" else 1
    for BM, BK, warps, stages in itertools.product((64, 128, 256), (16, 32, 64), (4, 8), (1, 2, 3, 4)):
        if tiles * BM * BO <= 128 * 32 * warps and (tiles * BM + BO) * BK * 2 * stages < 200_000:
            yield Tile(BM, BK, BO, warps, stages)


def make(layer: Layer, work: str) -> tuple[Callable[[Any], Any], Any]:
    """Return a function that does the work with a tile, and the tile that fedkeep chooses."""
    from fedkeep.engine.gpu.kernels import convolution, factors, tiles

    pad = layer.window // 2
    geometry = factors.Geometry((layer.size,) * 2, (layer.window,) * 2, 1, (pad, pad))
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=random)

    x = draw(layer.clients, layer.images, layer.size, layer.size, layer.channels).permute(0, 1, 4, 2, 3)
    w = draw(layer.clients, layer.outputs, layer.channels, layer.window, layer.window)
    images, weights, rotated = (
        factors.prepare_images(x, (pad, pad)),
        factors.prepare_weights(w),
        factors.prepare_rotated_weights(w),
    )
    y, place = convolution.convolve(images, weights, None, geometry.output, torch.float32, 1, True, layer.pool)
    g, _ = factors.gather_gradient(torch.randn_like(y).permute(0, 1, 4, 2, 3), place if layer.pool else y)
    padded, entries = images.values.shape[-1], layer.window**2 * images.values.shape[-1]
    if work == "forward":
        chosen = tiles.forward_tile(padded, layer.outputs, layer.pool)
        return lambda tile: convolution.convolve(
            images, weights, None, geometry.output, torch.float32, 1, True, layer.pool, tile
        ), chosen  # fmt: skip
    if work == "gradient of the input":
        wide = factors.spread_gradient(g, place, geometry, rotated.values.shape[-1])
        chosen = tiles.forward_tile(wide.values.shape[-1], layer.channels, False)
        return lambda tile: convolution.convolve(wide, rotated, None, geometry.size, torch.float32, tile=tile), chosen
    return lambda tile: convolution.weight_gradient(
        images, g, place, geometry, layer.channels, torch.float32, tile
    ), tiles.gradient_tile(layer.outputs, entries, layer.pool)  # fmt: skip


def microseconds(step: Callable[[], Any]) -> float:
    """Return the time of a launch, from the fastest replay."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            step()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES * 1e3)
    return min(times)


def compile_one(job: tuple[str, str, Any]) -> bool:
    """Compile the kernel of one candidate into Triton's cache; return whether that works."""
    name, work, tile = job
    try:
        make(LAYERS[name], work)[0](tile)
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main() -> None:
    """Print the best tiles of every layer and kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--best", type=int, default=4)
    args = parser.parse_args()
    cases = [(n, k) for n in LAYERS for k in WORK if (n, k) != ("cnn, layer 1", "gradient of the input")]
    jobs = [(name, work, tile) for name, work in cases for tile in candidates(LAYERS[name], work)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        works = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=8), strict=True))
    print(f"{torch.cuda.get_device_name()}; {len(jobs)} candidates; us per launch")
    for name, work in cases:
        run, chosen = make(LAYERS[name], work)
        tiles = [tile for job_name, job_work, tile in jobs if (job_name, job_work) == (name, work)]
        timed = [(microseconds(functools.partial(run, tile)), tile) for tile in tiles if works[name, work, tile]]
        print(f"{name}, {work}: {microseconds(functools.partial(run, chosen)):.1f} with {tuple(chosen)}")
        for time, tile in sorted(timed)[: args.best]:
            print(f"  {time:7.1f}  {tuple(tile)}", flush=True)


if __name__ == "__main__":
    main()
