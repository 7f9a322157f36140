"""Time of an evaluation on texts: batches of similar length next to batches in the order of the data.

    python benchmarks/text_evaluation.py --source sst5 --tokenizer FOLDER --model FOLDER [--bfloat16] [--threads 1]

Without options: generated texts, many of them short and few long, and the small transformer. Both sides evaluate the
same weights on the same texts. `in order` takes texts as they come, as many at a time as have 2^15 tokens if all were
as long as allowed; `by length` is what fedkeep does. Every line is the median of several evaluations, in turn, after
one of each; the ratio is how many times as fast the second is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.texts import Texts
from fedkeep.engine.evaluate import logits_and_loss
from fedkeep.task import Task

TOKENS_IN_ORDER = 2**15


def texts(options: argparse.Namespace) -> tuple[Texts, torch.Tensor, int]:
    """Return test texts, their labels and the number of classes."""
    if options.source is not None:
        data = fk.data.load(options.source, tokenizer=options.tokenizer, max_length=options.tokens)
        return data.x_test[: options.texts], data.y_test[: options.texts], data.n_classes
    rng = np.random.default_rng(0)
    form = fk.data.text_form(options.tokenizer, options.tokens)
    lengths = np.clip(rng.lognormal(3.1, 0.5, options.texts), 1, options.tokens).astype(int)
    tokens = [rng.integers(1, form.vocabulary, n) for n in lengths]
    return Texts.of(tokens, form), torch.from_numpy(rng.integers(0, 5, options.texts)), 5


def main() -> None:
    """Print seconds per evaluation of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="a data set of texts, such as sst5")
    parser.add_argument("--tokenizer", default="words:16384")
    parser.add_argument("--model", help="folder of a pre-trained model; without: the small transformer")
    parser.add_argument("--tokens", type=int, default=64, help="longest text")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="autocast = bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y, classes = texts(options)
    name, path = ("transformer", {"path": options.model}) if options.model else ("small_transformer", {})
    model = fk.models.build(name, x.form, classes, **path)
    task = Task(model, classes, 1, device=options.device, autocast=torch.bfloat16 if options.bfloat16 else None)
    params = tree.to(dict(model.named_parameters()), task.device)
    x, y, inputs = x.to(task.device), y.to(task.device), InputPipeline()
    size = TOKENS_IN_ORDER // options.tokens

    @torch.no_grad()
    def in_order() -> torch.Tensor:
        return torch.cat([task.apply(params, inputs(x[at : at + size])) for at in range(0, len(y), size)])

    def by_length() -> torch.Tensor:
        return logits_and_loss(task, params, x, y, inputs)[0]

    def seconds(evaluate: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        evaluate().sum().item()
        return time.perf_counter() - began

    difference = float((in_order() - by_length()).abs().max())
    times = [(seconds(in_order), seconds(by_length)) for _ in range(options.repeats)]
    before, after = (statistics.median(side) for side in zip(*times, strict=True))
    mean = float(x.length.float().mean())
    print(
        f"{len(y)} texts of {mean:.0f} tokens on average, {options.tokens} at most; largest difference {difference:.1e}"
    )
    print(f"in order   {before:7.3f} s")
    print(f"by length  {after:7.3f} s   {before / after:.1f} times as fast")


if __name__ == "__main__":
    main()
