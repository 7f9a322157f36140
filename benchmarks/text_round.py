"""Time of a round of ten transformers: fedkeep's stacked engine next to a plain script with `transformers`.

    python benchmarks/text_round.py --model FOLDER [--clients 10] [--steps 20] [--rounds 5] [--device cuda]

Every client takes `--steps` steps of Adam with batches of 16 texts of 64 tokens, then the weights are averaged. Both
sides have the same weights, tokens, optimiser, dropout and precision; the texts are random tokens, whose content does
not affect the time. The plain script trains client after client, with the attention that `transformers` chooses (sdpa)
and, for adapters, with `peft` where that is installed. Every line is the median of several rounds after two warm-up
rounds; the ratio is how many times as fast as the plain script fedkeep is.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fedkeep as fk
from fedkeep.data.texts import Texts
from fedkeep.models.lora import LoraLinear

LR, RANK, CLASSES = 1e-5, 8, 5
TARGETS = ["query", "value", "q_lin", "v_lin"]


def problem(options: argparse.Namespace) -> tuple[fk.data.Dataset, list[np.ndarray]]:
    """Make the data and the clients."""
    form = fk.data.text_form(options.model, options.tokens)
    rng = np.random.default_rng(0)
    per_client = options.steps * options.batch
    n = options.clients * per_client
    x = Texts.of(rng.integers(0, form.vocabulary, (n, options.tokens)), form)
    y = rng.integers(0, CLASSES, n)
    y[:CLASSES] = np.arange(CLASSES)
    data = fk.data.from_arrays(x, y, x[: options.batch], y[: options.batch], n_classes=CLASSES)
    return data, np.split(np.arange(n), options.clients)


def plain_model(options: argparse.Namespace, lora: bool) -> nn.Module:
    """Return the model of the plain script."""
    config = transformers.AutoConfig.from_pretrained(options.model, num_labels=CLASSES)
    for name, value in config.to_dict().items():
        if options.dropout is not None and "drop" in name and isinstance(value, float):
            setattr(config, name, options.dropout)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, config=config).float()
    if not lora:
        return model
    ends = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    targets = [name for name in TARGETS if name in ends]
    try:
        import peft
    except ImportError:
        return fk.models.add_lora(model, {"rank": RANK, "targets": targets}, train=("classifier",))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=targets)
    return peft.get_peft_model(model, config)


def plain_script(
    options: argparse.Namespace, data: fk.data.Dataset, clients: list[np.ndarray], lora: bool
) -> Callable[[], None]:
    """Return a round as a researcher would write it: client after client, data on the device, torch.optim."""
    device = torch.device(options.device)
    model = plain_model(options, lora).to(device)
    x = {key: value.to(device) for key, value in data.x_train.pad(options.tokens).items()}
    x["attention_mask"] = x["attention_mask"].long()
    y = data.y_train.to(device)
    local = copy.deepcopy(model).train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def train(own: torch.Tensor) -> dict[str, torch.Tensor]:
        trained = {name: p for name, p in local.named_parameters() if name in weights}
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(weights[name])
        optimizer = torch.optim.Adam(trained.values(), LR)
        for at in own[torch.randperm(len(own), device=device)].split(options.batch):
            optimizer.zero_grad()
            with autocast(options):
                z = local(input_ids=x["input_ids"][at], attention_mask=x["attention_mask"][at]).logits
            F.cross_entropy(z.float(), y[at]).backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in trained.items()}

    def step() -> None:
        states = [train(torch.from_numpy(own).to(device)) for own in clients]
        for name in names:
            weights[name].copy_(torch.stack([state[name] for state in states]).mean(0))

    return step


def stacked(
    options: argparse.Namespace, data: fk.data.Dataset, clients: list[np.ndarray], lora: bool, engine: str
) -> Callable[[], None]:
    """Return fedkeep's round."""
    model = fk.models.build(
        "transformer",
        data.input_shape,
        CLASSES,
        path=options.model,
        dropout=options.dropout,
        lora=RANK if lora else None,
    )
    assert sum(isinstance(layer, LoraLinear) for layer in model.modules()) > 0 or not lora
    settings = fk.Settings(
        rounds=10**6, participation=len(clients), epochs=1, batch_size=options.batch, optimizer="adam", lr=LR,
        weight_decay=0.0, lr_decay=1.0, device=options.device, engine=engine, eval_every=10**6,
        autocast="bfloat16" if options.bfloat16 else None,
    )  # fmt: skip
    simulation = fk.Simulation("fedavg", model, data, clients, settings)
    print(f"    engine {simulation.engine.name}, {simulation.task.n_weights:,} trained weights", flush=True)
    return lambda: simulation.step() and None


@contextmanager
def autocast(options: argparse.Namespace) -> Iterator[Any]:
    """Compute in bfloat16 if asked for."""
    with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.bfloat16):
        yield


def timed(step: Callable[[], Any], options: argparse.Namespace) -> float:
    """Time rounds, print their median and range, and return the median in seconds."""
    cuda = options.device.startswith("cuda")
    for _ in range(options.warm_up):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.rounds):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
    per_step = median / options.steps / options.clients
    print(
        f"    {median * 1e3:9.1f} ms a round ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}), "
        f"{per_step * 1e3:.2f} ms a client's step{memory}",
        flush=True,
    )
    return median


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    for name, default in (("clients", 10), ("steps", 20), ("batch", 16), ("tokens", 64), ("rounds", 5), ("warm-up", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dropout", type=float, default=None, help="instead of the model's own, on both sides")
    parser.add_argument("--bfloat16", action="store_true", help="autocast, on both sides")
    parser.add_argument("--engine", default="stacked", choices=("stacked", "loop", "auto"))
    parser.add_argument("--only", choices=("full", "lora"), help="one of the two kinds of training")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    data, clients = problem(options)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    dropout = "the model's own dropout" if options.dropout is None else f"dropout {options.dropout}"
    print(
        f"{options.clients} clients, {options.steps} steps of {options.batch} texts of {options.tokens} tokens, "
        f"{dropout}, {'bfloat16' if options.bfloat16 else 'float32, TF32 on a GPU'}; {where}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}"
    )
    for kind in ("full", "lora") if options.only is None else (options.only,):
        lora = kind == "lora"
        print(f"adapters of rank {RANK}" if lora else "all weights")
        print("  plain script")
        plain = timed(plain_script(options, data, clients, lora), options)
        print("  fedkeep")
        ours = timed(stacked(options, data, clients, lora, options.engine), options)
        print(f"  ratio {plain / ours:.2f}x", flush=True)


if __name__ == "__main__":
    main()
