"""Pre-trained transformers of Hugging Face's `transformers`, from a folder or from the hub, as networks of fedkeep."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeep._util.pretrained_files import load_files, load_tokenizer, tokenizer_identity
from fedkeep._util.text import format_value
from fedkeep._util.text_form import LONGEST, TextForm
from fedkeep._util.validate import require_choice, require_number
from fedkeep.errors import ModelError
from fedkeep.models.lora import TRAINED, Lora, add_lora_
from fedkeep.models.networks import Network
from fedkeep.models.text import TextInput, mask_scores, require_text, text_network

log = logging.getLogger("fedkeep")

ATTENTION = ("eager", "sdpa")
# the first position of these models is the one after the padding token's id
_SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "data2vec-text")


class PretrainedBody(nn.Module):
    """A model for sequence classification without its last linear layer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.ready_mask = False  # whether the net takes what is added to its scores instead of which tokens are real

    def forward(self, x: TextInput) -> Tensor:
        """Return the input of the classifier, [batch, width]."""
        mask = x["attention_mask"]
        if self.ready_mask:  # the library's own mask depends on values, which `vmap` does not allow
            dtype = next(self.net.parameters()).dtype
            mask = mask_scores(mask, dtype).expand(-1, -1, mask.shape[-1], -1)
        else:
            mask = mask.long()
        return self.net(input_ids=x["input_ids"], attention_mask=mask).logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def choose_mask(self, form: TextForm) -> None:
        """Use the ready mask if the net computes the same with it, for two texts of different lengths."""
        x = _two_texts(form)
        try:
            expected = self(x)
            self.ready_mask = True
            self.ready_mask = _is_close(self(x), expected)
        except Exception as error:  # an older version of the library, or another architecture
            log.debug("the model takes no ready mask: %s", error)
            self.ready_mask = False

    @torch.no_grad()
    def warn_of_padding(self, form: TextForm, path: str) -> None:
        """Warn if the net computes something else for a text that is followed by more padding."""
        x = _two_texts(form)
        wider = {"input_ids": F.pad(x["input_ids"], (0, 1), value=form.padding)}
        wider["attention_mask"] = F.pad(x["attention_mask"], (0, 1))
        if wider["input_ids"].shape[1] > form.max_length:
            return
        try:
            same = _is_close(self(wider), self(x))
        except Exception as error:  # a net that takes no such ids
            log.debug("the model cannot be tried: %s", error)
            return
        if not same:
            log.warning(
                "what the model %s computes for a text depends on how much padding follows it: results depend on which "
                "texts share a batch, and differ between engines; most other architectures do not",
                path,
            )


def _two_texts(form: TextForm) -> TextInput:
    """Return a batch of two texts of different lengths."""
    real = torch.tensor([[True] * 4, [True] * 3 + [False]])[:, : form.max_length]
    ids = torch.arange(real.numel()).reshape(real.shape) % form.vocabulary
    return {"input_ids": torch.where(real, ids, form.padding), "attention_mask": real}


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def transformer(
    input_shape: Any,
    n_classes: int,
    path: str | None = None,
    dropout: float | None = None,
    lora: int | Mapping[str, Any] | None = None,
    attention: str = "eager",
    projection: int | None = None,
    head: str = "linear",
) -> Network:
    """Return any `AutoModelForSequenceClassification`, from a folder or by its name on the hub.

    `dropout` replaces all of the model's own probabilities. With `lora`, a rank or the options of `add_lora`, only
    adapters, the classifier and what the files have no weights for are trained. `attention` is the implementation.
    """
    form = require_text("transformer", input_shape)
    require_choice("attention", attention, ATTENTION, error=ModelError)
    if not isinstance(path, str | Path) or not str(path):
        raise ModelError(
            f"path must be the folder of a model, or its name on the hub, not {format_value(path)}",
            key="path",
            value=path,
        )
    adapters = None if lora is None else Lora.of(lora)
    config = load_files("AutoConfig", str(path), "path", ModelError, num_labels=n_classes)
    require_fit(str(path), config, form)
    if config.model_type not in _SHIFTED_POSITIONS:  # there it decides which position is the first
        config.pad_token_id = form.padding  # decoders find the last token of a text by it
    form = replace(form, max_length=_n_positions(config) or LONGEST)
    if dropout is not None:
        _set_dropout(config, require_number("dropout", dropout, low=0, below=1, error=ModelError))
    net, about = load_files(
        "AutoModelForSequenceClassification",
        str(path),
        "path",
        ModelError,
        config=config,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        attn_implementation=attention,
        output_loading_info=True,
    )
    net = net.float().eval()
    classifier = _take_classifier(net, str(path), n_classes)
    body = PretrainedBody(net)
    body.choose_mask(form)
    body.warn_of_padding(form, str(path))
    network = text_network(body.train(), classifier.in_features, n_classes, form, projection, head)
    if projection is None and head == "linear":
        network.classifier = classifier
    new = tuple(f"body.net.{name}" for name in about["missing_keys"])  # weights that the files do not have
    network.pretrained = _hash({name: w for name, w in body.named_parameters(prefix="body") if name not in new})
    if adapters is not None:
        add_lora_(network, adapters, (*TRAINED, *new))
    return network


def require_fit(path: str, config: Any, form: TextForm) -> None:
    """Raise unless the texts fit the model: its tokenizer, its vocabulary and its number of positions."""
    n_tokens, own = getattr(config, "vocab_size", None), _tokenizer_of(path)
    too_many = n_tokens is not None and form.vocabulary > n_tokens
    if too_many or own not in (None, form.tokenizer):
        raise ModelError(
            f"the texts are tokens of {form.tokenizer}, which is not the tokenizer of the model {path}: load the data "
            f"with tokenizer = {format_value(path)}",
            key="path",
            value=path,
        )
    most = _n_positions(config)
    if most is not None and form.max_length > most:
        raise ModelError(
            f"the texts have up to {form.max_length} tokens, but the model {path} has {most} positions: load the data "
            f"with max_length = {most} or less",
            key="path",
            value=path,
        )


def _hash(weights: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        total.update(name.encode())
        total.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:12]


def _tokenizer_of(path: str) -> str | None:
    """Return which tokenizer a model comes with; None if it comes without one."""
    try:
        return tokenizer_identity(load_tokenizer(path, "path", ModelError))
    except ModelError as error:
        log.debug("%s", error)
        return None


def _n_positions(config: Any) -> int | None:
    most = getattr(config, "max_position_embeddings", None)
    if getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        return None
    if most is None or most <= 0:  # relative positions: any number
        return None
    shift = (config.pad_token_id or 0) + 1 if config.model_type in _SHIFTED_POSITIONS else 0
    return int(most) - shift


def _set_dropout(config: Any, p: float) -> None:
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, p)


def _take_classifier(net: nn.Module, path: str, n_classes: int) -> nn.Linear:
    """Return the net's last linear layer, with one output per class; the net returns that layer's input from now on."""
    linear = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    last = [name for name, layer in linear.items() if layer.out_features == n_classes]
    if not last:
        raise ModelError(f"the model {path} does not end in a linear classifier", key="path", value=path)
    parent, _, own = last[-1].rpartition(".")
    setattr(net.get_submodule(parent), own, nn.Identity())
    return linear[last[-1]]
