"""Text models and LoRA adapters: what they compute, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.problems import gap
from support.texts import make_text_data, make_text_problem, write_tiny, write_tiny_bert
from torch import nn

from fedkeep import models, tree
from fedkeep._util.text_form import TextForm
from fedkeep.engine.setup import require_fitting_texts
from fedkeep.errors import ModelError
from fedkeep.methods import FedAvg
from fedkeep.models.lora import LoraLinear
from fedkeep.task import Task

FORM = TextForm(16, 50, 0, "words:50")
SMALL = {"width": 8, "heads": 2, "layers": 2}


def batch(form: TextForm = FORM, width: int = 9) -> dict[str, torch.Tensor]:
    """Return four padded texts of random tokens."""
    mask = torch.arange(width) < torch.tensor([9, 1, 5, 3])[:, None]
    ids = torch.randint(1, form.vocabulary, (4, width), generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.where(mask, ids, form.padding), "attention_mask": mask}


def padded(x: dict[str, torch.Tensor], more: int = 4, padding: int = 0) -> dict[str, torch.Tensor]:
    values = {"input_ids": padding, "attention_mask": False}
    return {key: nn.functional.pad(t, (0, more), value=values[key]) for key, t in x.items()}


@pytest.mark.parametrize("name", ["bag", "small_transformer"])
@pytest.mark.parametrize("projection", [None, 6])
def test_a_text_model_is_independent_of_padding_and_has_features(name: str, projection: int | None) -> None:
    model = models.build(name, FORM, 5, projection=projection).eval()
    x = batch()
    assert model(x).shape == (4, 5)
    assert model.features(x).shape == (4, projection or 64)
    assert torch.allclose(model(x), model(padded(x)), atol=1e-6)
    assert torch.allclose(model(tree.take(x, [2, 0])), model(x)[[2, 0]], atol=1e-6)
    assert torch.equal(model.head(model.features(x)), model(x))
    assert not torch.allclose(model(x)[0], model(x)[1], atol=1e-4)


def test_the_sizes_of_the_text_models() -> None:
    """Tokens and positions; query, key, value, output; two dense layers; two norms per block and one at the end."""
    block = 4 * (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 2 * 16
    counts = {
        "bag": (50 * 64 + 64 * 5 + 5, {}),
        "small_transformer": ((50 + 16) * 8 + 2 * block + 16 + 8 * 5 + 5, SMALL),
    }
    for name, (count, options) in counts.items():
        model = models.build(name, FORM, 5, **options)
        assert sum(p.numel() for p in model.parameters()) == count


def test_a_bag_is_the_mean_of_its_embeddings() -> None:
    model = models.build("bag", FORM, 5)
    x = batch()
    expected = torch.stack(
        [model.body.embedding.weight[x["input_ids"][k, :n]].mean(0) for k, n in enumerate((9, 1, 5, 3))]
    )
    assert torch.allclose(model.features(x), expected, atol=1e-6)


def test_attention_is_that_of_torch() -> None:
    attention = models.build("small_transformer", FORM, 5, **SMALL, dropout=0.0).body.blocks[0].attention
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key.bias, attention.value.bias]))
    theirs.out_proj = attention.output
    mask = batch()["attention_mask"]
    h = torch.randn(4, 9, 8)
    expected = theirs(h, h, h, key_padding_mask=~mask)[0]
    masked = torch.where(mask, 0.0, -1e30)[:, None, None]
    assert torch.allclose(attention(h, masked), expected, atol=1e-6)


def test_dropout_is_used_in_training_alone() -> None:
    model = models.build("small_transformer", FORM, 5, dropout=0.5)
    assert not torch.equal(model(batch()), model(batch()))
    model.eval()
    assert torch.equal(model(batch()), model(batch()))


@pytest.mark.parametrize(
    ("name", "shape", "options", "key"),
    [
        ("bag", (3, 8, 8), {}, "input_shape"),
        ("transformer", (64,), {"path": "x"}, "input_shape"),
        ("mlp", FORM, {}, "name"),
        ("resnet8", FORM, {}, "name"),
        ("small_transformer", FORM, {"width": 9, "heads": 2}, "heads"),
        ("small_transformer", FORM, {"dropout": 1.0}, "dropout"),
        ("bag", FORM, {"width": 0}, "width"),
        ("transformer", FORM, {}, "path"),
        ("transformer", FORM, {"path": "x", "attention": "flash"}, "attention"),
        ("transformer", FORM, {"path": "x", "lora": 0}, "lora.rank"),
        ("transformer", FORM, {"path": "x", "lora": {"rnk": 2}}, "lora"),
        ("transformer", FORM, {"path": "x", "lora": {"targets": "query"}}, "lora.targets"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, options, key) -> None:
    with raises(ModelError, key):
        models.build(name, shape, 5, **options)


def test_texts_of_another_tokenizer_or_with_more_tokens_than_positions_are_refused() -> None:
    data = make_text_data()
    require_fitting_texts(models.build("small_transformer", data.input_shape, 3), data.x_train)
    with raises(ModelError, "tokenizer", "words:60", valid=["words:50"]):
        require_fitting_texts(models.build("bag", FORM, 3), data.x_train)
    short = TextForm(8, 60, 0, "words:60")
    with raises(ModelError, "max_length", 24, mentions=["24", "8"]):
        require_fitting_texts(models.build("small_transformer", short, 3), data.x_train)
    require_fitting_texts(models.build("bag", short, 3), data.x_train)  # it has no positions


# adapters


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained() -> None:
    model = models.build("small_transformer", FORM, 5, **SMALL).eval()
    adapted = models.add_lora(model, {"rank": 2, "alpha": 6})
    assert torch.equal(adapted(batch()), model(batch()))
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    expected = {
        f"body.blocks.{k}.attention.{one}.{part}"
        for k in (0, 1)
        for one in ("query", "value")
        for part in ("down", "up")
    }
    assert set(trained) == {*expected, "classifier.weight", "classifier.bias"}
    assert sum(trained.values()) == 4 * (2 * 8 + 8 * 2) + 45
    assert all(p.requires_grad for p in model.parameters()), "the original is not changed"
    assert adapted.body.blocks[0].attention.query.scale == 3


def test_an_adapter_adds_a_product_and_can_be_merged() -> None:
    layer = LoraLinear(nn.Linear(5, 4), models.lora.Lora(rank=2))
    nn.init.normal_(layer.up)
    x = torch.randn(3, 7, 5)
    expected = x @ layer.weight.T + layer.bias + 2 * x @ layer.down.T @ layer.up.T
    assert torch.allclose(layer(x), expected, atol=1e-6)
    model = models.add_lora(models.build("small_transformer", FORM, 5, **SMALL), 2).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    merged = models.merge_lora(model)
    assert not any(isinstance(module, LoraLinear) for module in merged.modules())
    assert torch.allclose(merged(batch()), model(batch()), atol=1e-4)


def test_targets_are_ends_of_names() -> None:
    model = models.build("small_transformer", FORM, 5, **SMALL)
    one = models.add_lora(model, {"targets": ["attention.key"]})
    assert [name for name, m in one.named_modules() if isinstance(m, LoraLinear)] == [
        "body.blocks.0.attention.key",
        "body.blocks.1.attention.key",
    ]
    every = models.add_lora(model, {"targets": [""]})
    assert sum(isinstance(m, LoraLinear) for m in every.modules()) == 12
    assert isinstance(every.classifier, nn.Linear)
    with raises(ModelError, "lora.targets", ("qery",), valid=["query", "key", "value"]):
        models.add_lora(model, {"targets": ["qery"]})


class Wrapped(nn.Module):
    """Queries, values and a classifier, under the names that other libraries use, in a module of the user's."""

    def __init__(self, **heads: nn.Module) -> None:
        super().__init__()
        self.net = nn.Module()
        self.net.query, self.net.value = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, head in heads.items():
            setattr(self.net, name, head)


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("heads", "expected", "warned"),
    [
        (["classifier"], ["classifier"], False),
        (["pre_classifier", "classifier"], ["pre_classifier", "classifier"], False),
        (["score"], ["score"], False),
        (["score", "out"], ["score", "out"], False),  # a score of an attention, as a pooling has
        (["projection", "classifier"], ["projection", "classifier"], False),
        (["inner", "out"], ["out"], True),
        ([], [], True),
    ],
)
def test_the_classifier_is_trained_next_to_adapters(
    heads: list[str], expected: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is called; it may be inside a module of the user's."""
    model = Wrapped(**{name: nn.Linear(4, 4) for name in heads})
    adapters = {f"net.{layer}.{part}" for layer in ("query", "value") for part in ("down", "up")}
    weights = {f"net.{name}.{part}" for name in expected for part in ("weight", "bias")}
    assert trained(models.add_lora(model, 2)) == adapters | weights
    assert len(caplog.messages) == warned
    caplog.clear()
    assert trained(models.add_lora(model, 2, train=[])) == adapters
    for name in heads:
        one = models.add_lora(model, 2, train=[f"net.{name}"])
        assert trained(one) == adapters | {f"net.{name}.weight", f"net.{name}.bias"}
    assert not caplog.messages
    with raises(ModelError, "train", "clasifier"):
        models.add_lora(model, 2, train=["clasifier"])
    with raises(ModelError, "train", "classifier"):
        models.add_lora(model, 2, train="classifier")


@pytest.mark.parametrize("target", ["linear2", "linear1", "score", ""])
def test_a_target_has_an_adapter_also_if_it_may_be_the_classifier(target: str) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    model.score = nn.Linear(8, 2) if target == "score" else nn.Identity()
    adapted = models.add_lora(model, {"rank": 2, "targets": [target]})
    name = target or "linear2"
    assert isinstance(adapted.get_submodule(name), LoraLinear)
    assert {f"{name}.down", f"{name}.up"} <= trained(adapted)
    assert f"{name}.layer.weight" not in trained(adapted)


def test_a_classifier_under_two_names_can_be_named_by_both() -> None:
    model = Wrapped(fc=nn.Linear(4, 2))
    model.net.classifier = model.net.fc
    for train in (["net.classifier"], ["net.fc"], None):
        assert {"net.fc.weight", "net.fc.bias"} <= trained(models.add_lora(model, 2, train=train))


def test_a_layer_under_two_names_has_one_adapter() -> None:
    model = Wrapped(classifier=nn.Linear(4, 2))
    model.net.value = model.net.query
    adapted = models.add_lora(model, 2)
    assert isinstance(adapted.net.query, LoraLinear)
    assert adapted.net.value is adapted.net.query
    nn.init.normal_(adapted.net.query.up)
    merged = models.merge_lora(adapted)
    x = torch.randn(3, 4)
    assert merged.net.value is merged.net.query
    assert torch.allclose(merged.net.query(x), adapted.net.query(x), atol=1e-6)


def test_frozen_weights_are_in_memory_once() -> None:
    task = Task(models.add_lora(models.build("small_transformer", FORM, 5, **SMALL), 2), 5, 1)
    training, evaluation = (dict(module.named_parameters()) for module in task.modules)
    assert task.frozen.keys() == training.keys() - task.init.keys()
    assert all(training[name] is evaluation[name] for name in task.frozen)
    assert not any(training[name] is evaluation[name] for name in task.init)


# pre-trained models


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    return write_tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def form(bert: Path) -> TextForm:
    shape = make_text_data(str(bert)).input_shape
    assert isinstance(shape, TextForm)
    return shape


def test_a_pre_trained_model_computes_what_the_library_does(bert: Path, form: TextForm) -> None:
    import transformers

    model = models.build("transformer", form, 3, path=str(bert), seed=4).eval()
    x = batch(form)
    task = Task(model, 3, 2)
    stacked = tree.stack([task.init, tree.scale(task.init, 1.1)])
    both = torch.vmap(task.apply)(stacked, tree.stack([x, x]))
    assert torch.allclose(both[0], model(x), atol=1e-6)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3).eval()
    theirs.classifier = model.classifier
    assert torch.allclose(model(x), theirs(x["input_ids"], x["attention_mask"].long()).logits, atol=1e-5)
    assert torch.allclose(model(x), model(padded(x)), atol=1e-6)
    assert torch.equal(model.head(model.features(x)), model(x))
    assert model.pretrained == models.build("transformer", form, 3, path=str(bert), seed=5).pretrained
    projected = models.build("transformer", form, 3, path=str(bert), projection=4, head="etf")
    assert projected.features(x).shape == (4, 4)


def test_a_pre_trained_model_depends_on_the_seed_alone(bert: Path, form: TextForm) -> None:
    one, same, other = (models.build("transformer", form, 3, path=str(bert), seed=s, lora=2) for s in (4, 4, 5))
    pairs = zip(one.state_dict().items(), same.state_dict().values(), other.state_dict().values(), strict=True)
    changed = {name for (name, a), b, c in pairs if not torch.equal(a, c) or not torch.equal(a, b)}
    assert changed
    assert all(name.endswith(".down") or name.startswith("classifier") for name in changed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))


def test_dropout_of_a_pre_trained_model_can_be_replaced(bert: Path, form: TextForm) -> None:
    model = models.build("transformer", form, 3, path=str(bert), dropout=0.0)
    assert torch.equal(model(batch(form)), model(batch(form)))
    model = models.build("transformer", form, 3, path=str(bert))
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1}


def test_what_does_not_fit_a_pre_trained_model_is_refused(bert: Path, form: TextForm, tmp_path: Path) -> None:
    with raises(ModelError, "path", str(bert), mentions=["words:50", f"tokenizer = '{bert}'"]) as caught:
        models.build("transformer", FORM, 3, path=str(bert))
    assert "\n" not in str(caught.value)
    long = TextForm(33, form.vocabulary, form.padding, form.tokenizer)
    with raises(ModelError, "path", str(bert), mentions=["33 tokens", "32 positions", "max_length = 32"]):
        models.build("transformer", long, 3, path=str(bert))
    with raises(ModelError, "path", str(tmp_path / "none"), mentions=[str(tmp_path / "none")]):
        models.build("transformer", form, 3, path=str(tmp_path / "none"))


def test_only_safetensors_files_are_read(bert: Path, form: TextForm, tmp_path: Path) -> None:
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with raises(ModelError, "path", mentions=["safetensors"]):
        models.build("transformer", form, 3, path=str(tmp_path))
    torch.save(models.build("bag", form, 3).state_dict(), tmp_path / "pytorch_model.bin")
    with raises(ModelError, "path", mentions=["safetensors", "pytorch_model.bin", "pickle"]) as caught:
        models.build("transformer", form, 3, path=str(tmp_path))
    assert "\n" not in str(caught.value)


# other architectures


@pytest.mark.parametrize("padding", [None, "[PAD]"])
def test_a_decoder_needs_no_padding_token_and_has_adapters(tmp_path: Path, padding: str | None) -> None:
    """GPT-2: its tokenizer and its config name no padding, and its linear layers are transposed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    config = transformers.GPT2Config(n_positions=24, n_embd=8, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=2)
    assert config.pad_token_id is None
    folder = write_tiny(tmp_path, config, padding)
    form = make_text_data(str(folder)).input_shape
    assert form.padding == (2 if padding is None else 0)
    model = models.build("transformer", form, 3, path=str(folder), lora=2).eval()
    x = batch(form)
    alone = {key: t[1:2, :1] for key, t in x.items()}
    assert torch.allclose(model(x)[1], model(alone)[0], atol=1e-5), "a text is classified by its last token"
    [adapter] = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert adapter.down.shape == (2, 8)
    assert adapter.up.shape == (24, 2)
    nn.init.normal_(adapter.up)
    assert torch.allclose(models.merge_lora(model)(x), model(x), atol=1e-5)


def test_a_decoder_finds_the_last_token_by_the_padding_of_its_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config names another token for padding than the tokenizer, which pads with the end of a text."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = write_tiny(tmp_path, transformers.LlamaConfig(max_position_embeddings=24, pad_token_id=0, **sizes), None)
    form = make_text_data(str(folder)).input_shape
    assert form.padding == 2
    model = models.build("transformer", form, 3, path=str(folder)).eval()
    assert torch.allclose(model(batch(form)), model(padded(batch(form), padding=2)), atol=1e-5)
    assert not caplog.messages


def test_an_encoder_decoder_is_read(tmp_path: Path) -> None:
    """BART refuses texts with different numbers of end tokens, as made-up ones have."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    sizes = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=24,
                                     pad_token_id=0, eos_token_id=2, bos_token_id=2, **sizes)  # fmt: skip
    folder = write_tiny(tmp_path, config)
    form = make_text_data(str(folder)).input_shape
    model = models.build("transformer", form, 3, path=str(folder)).eval()
    ids = torch.tensor([[5, 6, 2], [5, 2, 0]])
    x = {"input_ids": ids, "attention_mask": ids != 0}
    assert torch.allclose(model(x), model(padded(x)), atol=1e-5)


def test_a_model_whose_output_depends_on_padding_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bert: Path, form: TextForm
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    config = transformers.XLNetConfig(d_model=8, n_layer=1, n_head=2, d_inner=8, pad_token_id=0)
    folder = write_tiny(tmp_path, config)
    models.build("transformer", make_text_data(str(folder)).input_shape, 3, path=str(folder))
    [message] = caplog.messages
    assert "padding" in message
    assert str(folder) in message
    models.build("transformer", form, 3, path=str(bert))
    assert len(caplog.messages) == 1


def test_adapters_of_peft_are_what_is_trained(bert: Path, form: TextForm) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    transformers = pytest.importorskip("transformers")

    class Net(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.net(input_ids=x["input_ids"], attention_mask=x["attention_mask"].long()).logits

    net = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    options = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    problem = make_text_problem(Net(peft.get_peft_model(net, options)), make_text_data(str(bert)))
    done = problem.run(FedAvg())
    assert done.params.keys() == trained(problem.model)
    assert {name.split(".")[-3] for name in done.params} >= {"lora_A", "lora_B"}
    assert gap(done.params, {name: p.detach().double() for name, p in problem.model.named_parameters()}) > 1e-3
