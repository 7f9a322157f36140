"""Small problems of texts, and a tiny pre-trained model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedkeep import models
from fedkeep.data import Dataset, from_arrays
from fedkeep.data.texts import Texts
from fedkeep.data.tokenizers import make_tokenizer
from support.problems import Problem

SUBJECTS = ("film actor plot scene camera director", "match goal team score league coach", "court law judge vote trial")
MAX_LENGTH = 24


def make_sentences(n: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Return n texts of 1 to 20 words about one of three subjects, and which."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % len(SUBJECTS)
    words = [rng.choice([*SUBJECTS[c].split(), "the", "a", "very"], rng.integers(1, 21)) for c in y]
    return [" ".join(one) for one in words], y


def make_text_data(tokenizer: str = "words:60", n: int = 66) -> Dataset:
    """Return texts of three classes, with a public set."""
    texts, y = make_sentences(n)
    made = make_tokenizer(tokenizer)
    x = Texts.of(made.encode(texts, MAX_LENGTH), made.form(MAX_LENGTH))
    data = from_arrays(x[: n - 11], y[: n - 11], x[n - 26 :], y[n - 26 :], n_classes=3)
    return data.with_public(2, validation=0.25)


def make_text_problem(model: nn.Module | None = None, data: Dataset | None = None) -> Problem:
    """Return six clients of unequal size, sorted by class, one smaller than a batch; float64."""
    data = data or make_text_data()
    order = np.argsort(data.y_train.numpy(), kind="stable")
    clients = np.split(order, [3, 14, 20, 30, 41])
    settings = {
        "rounds": 2,
        "participation": 4,
        "epochs": 2,
        "batch_size": 4,
        "lr": 0.1,
        "dtype": "float64",
        "engine": "loop",
        "device": "cpu",
        "seed": 5,
    }
    small = {"width": 8, "heads": 2, "layers": 1, "dropout": 0.0}
    model = model or models.build("small_transformer", data.input_shape, 3, seed=3, **small)
    return Problem(model, data, clients, settings)


def write_tiny_bert(folder: Path, positions: int = 32, **changes: int) -> Path:
    """Write a BERT of random weights and its tokenizer, whose vocabulary is the words of the sentences."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_words()]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, **changes}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=positions, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_tiny(folder: Path, config: Any, padding: str | None = "[PAD]") -> Path:
    """Write another model for sequence classification, given its config, and a tokenizer of the sentences' words."""
    import tokenizers
    import torch
    import transformers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "</s>", *_words()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known = {"unk_token": "[UNK]", "eos_token": "</s>", "pad_token": padding}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known).save_pretrained(folder)
    config.vocab_size = len(vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def _words() -> list[str]:
    return ["the", "a", "very", *dict.fromkeys(" ".join(SUBJECTS).split())]
