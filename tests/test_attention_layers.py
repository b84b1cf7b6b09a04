"""nn.MultiheadAttention: the adapters on its input projections and its output projection act, however its owner runs it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onegraph.checkpoint
from cases import METHODS, MethodCase
from onegraph.adapters import Adapters, adapters_of, attach
from onegraph.errors import OnegraphError
from onegraph.layers import AttentionLayer, ReadLinearLayer, describe, describe_any
from onegraph.methods import Dense, LoRA, Method

WIDTH, HEADS = 8, 2
FIRST = {type(case.method): case for case in reversed(METHODS.values()) if "linear" in case.method.kinds}
every_method = pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.method.name)


class Attention(nn.Module):
    """Attention alone, with every argument its caller can choose."""

    def __init__(self, num_heads: int = HEADS, *, batch_first: bool = True, **options: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, num_heads, batch_first=batch_first, **options)

    def forward(self, x: Tensor, memory: Tensor | None = None, **arguments: object) -> Tensor:
        memory = x if memory is None else memory
        y, weights = self.attn(x, memory, memory, **arguments)
        return y if weights is None else y + weights.sum()


class VisionBlock(nn.Module):
    """A block of torchvision's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class TextBlock(nn.Module):
    """A block of CLIP's text encoder as OpenAI wrote it: the sequence first, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(OrderedDict([("c_fc", nn.Linear(WIDTH, 12)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(12, WIDTH))]))
        self.ln_2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu_(1)
        x = x + self.attn(self.ln_1(x), self.ln_1(x), self.ln_1(x), need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Named(nn.Module):
    """A caller that names every argument, as the decoder of Mask2Former does."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attn(query=x, key=x, value=x)[0]
        return y


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=12, dropout=0.0, batch_first=True)


def _encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(_encoder_layer(), num_layers=2)


PADDING = torch.tensor([[False, False, False, False], [False, False, False, True], [False, False, True, True]])
CAUSAL = torch.full((4, 4), float("-inf")).triu(1)
EVERYTHING = {
    "attention": (Attention, {}),
    "attention-weights-unwanted": (Attention, {"need_weights": False}),
    "attention-padding": (Attention, {"key_padding_mask": PADDING}),
    "attention-bool-mask": (Attention, {"attn_mask": CAUSAL < 0, "need_weights": False}),
    "attention-float-mask": (Attention, {"attn_mask": CAUSAL}),
    "attention-causal": (Attention, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "attention-mask-a-head": (Attention, {"attn_mask": torch.randn(3 * HEADS, 4, 4)}),
    "attention-weights-a-head": (Attention, {"average_attn_weights": False}),
    "attention-memory": (Attention, {"memory": torch.randn(3, 4, WIDTH)}),
    "attention-sequence-first": (lambda: Attention(batch_first=False), {}),
    "attention-no-bias": (lambda: Attention(bias=False), {}),
    "attention-key-bias": (lambda: Attention(add_bias_kv=True), {}),
    "attention-zero": (lambda: Attention(add_zero_attn=True), {}),
    "attention-odd-heads": (lambda: Attention(1), {}),
    "vision-block": (VisionBlock, {}),
    "text-block": (TextBlock, {}),
    "named": (Named, {}),
    "encoder-layer": (_encoder_layer, {}),
    "encoder-layer-causal": (_encoder_layer, {"src_mask": CAUSAL}),
    "encoder-layer-padding": (_encoder_layer, {"src_key_padding_mask": PADDING}),
    "encoder": (_encoder, {}),
    "encoder-padding": (_encoder, {"src_key_padding_mask": PADDING}),
}
"""A model and the arguments it is called with beside x (3, 4, E)."""
every_model = pytest.mark.parametrize("name", EVERYTHING)


def targets(path: str, module: nn.Module) -> bool:
    """Everything with weights of a product."""
    return isinstance(module, nn.Linear | nn.MultiheadAttention)


def adapted(name: str, method: Method) -> tuple[nn.Module, Adapters, Tensor, dict[str, object]]:
    """A model, its adapter with random tensors, an input and further arguments."""
    torch.manual_seed(3)
    build, arguments = EVERYTHING[name]
    model = build()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    adapters = attach(model, method, targets=targets)
    randomise(adapters)
    return model, adapters, torch.randn(3, 4, WIDTH), arguments


def randomise(adapters: Adapters, name: str = "default") -> None:
    """Tensors that matter, whatever the start."""
    with torch.no_grad():
        for parameter in adapters.parameters(name).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def dense(adapters: Adapters) -> nn.Module:
    """The plain model with the adapted weights in it: built by hand, without merging."""
    copied = adapters_of(copy.deepcopy(adapters.model))
    assert copied is not None
    found: dict[str, dict[str, Tensor]] = {}
    for path, layer in copied.layers.items():
        p = {**layer._parameters, **layer._constants}
        own = layer.layer.base_tensors(layer.base_layer)
        tensors = layer._method.adapt_tensors(own, p, layer.layer)
        found[path] = {layer.layer.attribute(name): value.detach() for name, value in tensors.items()}
    model = copied.detach()
    for path, tensors in found.items():
        module = model.get_submodule(path)
        for attribute, value in tensors.items():
            setattr(module, attribute, nn.Parameter(value))
    return model


@every_model
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # what the plain encoder uses for padding
def test_equals_the_model_with_the_adapted_weights(name: str, training: bool) -> None:
    model, adapters, x, arguments = adapted(name, LoRA(rank=3))
    model.train(training)
    expected = dense(adapters).train(training)
    for grad in (True, False):
        adapters.use("default")
        with torch.set_grad_enabled(grad):
            found, wanted = model(x, **arguments), expected(x, **arguments)
        if name == "encoder-padding":  # there the fused kernel writes zeros where the padding is
            found, wanted = found[~PADDING], wanted[~PADDING]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        adapters.use(None)
        with torch.set_grad_enabled(grad):
            without = model(x, **arguments)
        assert (without.flatten()[:24] - found.flatten()[:24]).abs().max() > 0.01  # the adapter does act


def test_each_projection_acts_in_the_fused_kernels() -> None:
    """In inference, where an owner could read the plain weight: one layer adapted at a time."""
    x = torch.randn(3, 4, WIDTH)
    for path in ("self_attn", "self_attn.out_proj", "linear1", "linear2"):
        torch.manual_seed(0)
        model = _encoder_layer().eval()
        with torch.no_grad():
            plain = model(x)
            adapters = attach(model, LoRA(rank=2), targets=[path])
            torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-6)
            randomise(adapters)
            assert (model(x) - plain).abs().max() > 0.01
            torch.testing.assert_close(model(x), dense(adapters)(x), rtol=1e-5, atol=1e-5)


def test_the_fused_kernels_are_back_after_detaching() -> None:
    model = _encoder().eval()
    before = [(layer.activation_relu_or_gelu, model.use_nested_tensor) for layer in model.layers]
    adapters = attach(model, LoRA(rank=2), targets=["layers.0.linear1"])
    assert model.layers[0].activation_relu_or_gelu == 0
    assert not model.use_nested_tensor
    adapters.add("more", LoRA(rank=2), targets=["layers.1.linear2"])
    assert model.layers[1].activation_relu_or_gelu == 0
    adapters.detach()
    assert [(layer.activation_relu_or_gelu, model.use_nested_tensor) for layer in model.layers] == before


@every_method
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_method(case: MethodCase, training: bool) -> None:
    model, adapters, x, _ = adapted("encoder-layer", case.method)
    model.train(training)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(adapters).train(training)(x), rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@every_method
def test_gradients_and_one_graph(case: MethodCase) -> None:
    """Compiled whole: outputs and gradients are eager's, and another adapter runs on the same graph."""
    model, adapters, x, _ = adapted("encoder-layer", case.method)
    adapters.add("other", case.method)
    randomise(adapters, "other")
    x.requires_grad_()

    def step(run: Callable[[Tensor], Tensor], name: str) -> list[Tensor]:
        adapters.use(name)
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *adapters.parameters().values()])]

    expected = {name: step(model, name) for name in ("default", "other")}
    assert not torch.allclose(expected["default"][0], expected["other"][0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(compiled, "default")
    with torch.compiler.set_stance("fail_on_recompile"):
        for name in ("other", "default"):
            for found, wanted in zip(step(compiled, name), expected[name], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["attention", "attention-weights-unwanted", "vision-block", "text-block", "encoder", "named"])
def test_one_graph_in_inference(name: str) -> None:
    model, adapters, x, arguments = adapted(name, LoRA(rank=3))
    adapters.add("other", LoRA(rank=2, alpha=3))
    randomise(adapters, "other")
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x, **arguments)
        with torch.compiler.set_stance("fail_on_recompile"):
            for chosen in ("other", None, "default"):
                adapters.use(chosen)
                torch.testing.assert_close(compiled(x, **arguments), model(x, **arguments), rtol=1e-5, atol=1e-5)


# An adapter for every row


class Unbatched(nn.Module):
    """Attention whose weights are of use: what each row attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attn(x, x, x, average_attn_weights=False)
        return y + weights.square().sum((1, 3)).unsqueeze(-1)


EVERYTHING["row-weights"] = (Unbatched, {})
ROWS = [name for name in EVERYTHING if name.startswith("attention-") and "first" not in name and "weights-a-head" not in name]


def row(value: object, i: int) -> object:
    """A row's own part of an argument."""
    if not isinstance(value, Tensor) or value.shape == (4, 4):
        return value
    return value[i * HEADS : (i + 1) * HEADS] if len(value) == 3 * HEADS else value[i : i + 1]


@pytest.mark.parametrize("name", [*ROWS, "vision-block", "row-weights"])
def test_rows(name: str) -> None:
    torch.manual_seed(3)
    build, arguments = EVERYTHING[name]
    if name in ROWS:
        arguments = {**arguments, "need_weights": False}  # the model would add up the weights of all rows
    model = build()
    adapters = attach(model, LoRA(rank=3), targets=targets)
    adapters.add("dense", Dense(), targets=targets)
    for adapter in adapters.names:
        randomise(adapters, adapter)
    x = torch.randn(3, 4, WIDTH)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for training in (True, False):
        model.train(training)
        with adapters.rows(["dense", "dense", "default"]):
            compiled(x, **arguments)
        for names in (["default", "dense", None], ["dense", None, "default"]):
            with adapters.rows(names):
                found = model(x, **arguments)
                with torch.compiler.set_stance("fail_on_recompile"):
                    torch.testing.assert_close(compiled(x, **arguments), found, rtol=1e-5, atol=1e-5)
            for i, adapter in enumerate(names):
                adapters.use(adapter)
                alone = model(x[i : i + 1], **{key: row(value, i) for key, value in arguments.items()})
                torch.testing.assert_close(found[i : i + 1], alone, rtol=1e-5, atol=1e-5)


def test_rows_where_the_sequence_is_first() -> None:
    model = TextBlock()
    adapters = attach(model, LoRA(rank=3, bias=True), targets=["attn", "out_proj"])
    adapters.add("other", Dense(), targets=["out_proj"])
    for adapter in adapters.names:
        randomise(adapters, adapter)
    x = torch.randn(4, 3, WIDTH)
    with adapters.rows(["other", None, "default"]):
        found = model(x)
        found.square().sum().backward()
    for i, adapter in enumerate(["other", None, "default"]):
        adapters.use(adapter)
        torch.testing.assert_close(found[:, i : i + 1], model(x[:, i : i + 1]), rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is not None for parameter in adapters.parameters("other").values())
    with pytest.raises(OnegraphError) as raised, adapters.rows([None, "default"]):
        model(x)
    assert raised.value.code == "row-count"


def test_rows_of_a_weight_that_is_read_where_its_owner_is_adapted() -> None:
    model = VisionBlock()
    adapters = attach(model, LoRA(rank=2), targets=["self_attention.out_proj", "mlp.0"])
    adapters.add("elsewhere", LoRA(rank=2), targets=["mlp.0"])
    randomise(adapters)
    randomise(adapters, "elsewhere")
    x = torch.randn(2, 4, WIDTH)
    before = model(x)
    with pytest.raises(OnegraphError) as raised, adapters.rows(["default", None]):
        raise AssertionError("never entered")
    assert raised.value.code == "rows-unsupported"
    assert "adapt 'self_attention' too" in raised.value.hint
    assert torch.equal(model(x), before)
    with adapters.rows(["elsewhere", None]):  # an adapter that isn't on that layer can
        found = model(x)
    adapters.use("elsewhere")
    torch.testing.assert_close(found[:1], model(x[:1]), rtol=1e-5, atol=1e-5)
    adapters.use(None)
    torch.testing.assert_close(found[1:], model(x[1:]), rtol=1e-5, atol=1e-5)
    adapters.reserve(method=LoRA(rank=2), targets=["self_attention"])
    with adapters.rows(["default", None]):
        torch.testing.assert_close(model(x), torch.cat([before[:1], found[1:]]), rtol=1e-5, atol=1e-5)


# What a model goes through


def test_descriptions() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=False, add_bias_kv=True)
    layer = describe(module)
    assert isinstance(layer, AttentionLayer)
    assert (layer.in_features, layer.out_features, layer.has_bias, layer.batch_axis) == (WIDTH, 3 * WIDTH, False, 1)
    assert layer.tensor_shapes() == {name: tuple(value.shape) for name, value in layer.base_tensors(module).items()}
    assert layer == describe_any(nn.MultiheadAttention(WIDTH, HEADS, bias=False, add_bias_kv=True))
    assert hash(layer) == hash(describe(module))
    assert isinstance(describe(module.out_proj), ReadLinearLayer)
    x = torch.randn(4, 2, WIDTH)
    assert torch.equal(layer.call(module, layer.base_tensors(module), x, x, x)[0], module(x, x, x)[0])


def test_an_output_projection_that_is_called_after_all() -> None:
    model = nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(WIDTH, 6))
    adapters = attach(model, LoRA(rank=2), targets=["0"])
    randomise(adapters)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(model(x), dense(adapters)(x), rtol=1e-5, atol=1e-5)


def test_three_weights_are_refused_and_their_output_projection_is_not() -> None:
    model = nn.Sequential(OrderedDict(attn=nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=4)))
    with pytest.raises(OnegraphError) as raised:
        attach(model, LoRA(), targets=["attn"])
    assert raised.value.code == "unsupported-layer"
    assert "three weights (kdim=6 and vdim=4" in str(raised.value)
    assert "out_proj" in raised.value.hint
    adapters = attach(model, LoRA(), targets=["attn.out_proj"])
    randomise(adapters)
    q, k, v = torch.randn(2, 1, WIDTH), torch.randn(3, 1, 6), torch.randn(3, 1, 4)
    torch.testing.assert_close(model.attn(q, k, v)[0], dense(adapters).attn(q, k, v)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["attn", "attn.out_proj"])
def test_dropouts_that_can_not_act_are_refused(target: str) -> None:
    with pytest.raises(OnegraphError) as raised:
        attach(Attention(), LoRA(input_dropout=0.1, dropout=0.2), targets=[target])
    assert raised.value.code == "unsupported-layer"
    assert "dropout, input_dropout can't act there" in str(raised.value)


def test_a_bias_where_there_was_none() -> None:
    model = Attention(bias=False)
    adapters = attach(model, LoRA(rank=2, bias=True), targets=["attn", "out_proj"])
    randomise(adapters)
    x = torch.randn(3, 4, WIDTH)
    with_bias = Attention()
    plain = dense(adapters)
    with torch.no_grad():
        for name, parameter in plain.attn.named_parameters():
            with_bias.attn.get_parameter(name).copy_(parameter)
    assert plain.attn.in_proj_bias is not None
    torch.testing.assert_close(model(x), with_bias(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["attn", "out_proj"])
def test_the_order_of_attaching_makes_no_difference(first: str) -> None:
    second = "out_proj" if first == "attn" else "attn"
    model = Attention()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    structure = str(model)
    adapters = attach(model, LoRA(rank=2), targets=[first])
    adapters.add("both", LoRA(rank=2), targets=[first, second])
    assert set(adapters.layers) == {"attn", "attn.out_proj"}
    adapters.use("both")
    randomise(adapters, "both")
    model(torch.randn(3, 4, WIDTH)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapters.parameters("both").items()}
    assert len(gradients) == 4
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    adapters.detach()
    assert str(model) == structure
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_state_dict_copies_and_moves() -> None:
    model, _, x, _ = adapted("encoder-layer", LoRA(rank=2))
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    other, _, _, _ = adapted("encoder-layer", LoRA(rank=2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), expected)
    fresh, _, _, _ = adapted("encoder-layer", LoRA(rank=2))
    plain = _encoder_layer()
    missing = fresh.load_state_dict(plain.state_dict(), strict=False)  # the keys of the model before attaching
    assert not missing.unexpected_keys
    assert all(key.endswith(("down", "up")) for key in missing.missing_keys)
    torch.testing.assert_close(fresh.self_attn.base_layer.in_proj_weight, plain.self_attn.in_proj_weight)
    torch.testing.assert_close(fresh.self_attn.base_layer.out_proj.base_layer.weight, plain.self_attn.out_proj.weight)
    model.to(torch.float64)
    assert model(x.double()).dtype == torch.float64


@every_method
def test_merging(case: MethodCase) -> None:
    model, adapters, x, _ = adapted("encoder-layer", case.method)
    expected = model(x)
    own = {name: value.clone() for name, value in model.named_parameters() if "base_layer" in name}
    adapters.merge()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    adapters.unmerge()
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in own.items())
    torch.testing.assert_close(model(x), expected)
    plain = adapters.merge_and_unload()
    assert plain.state_dict().keys() == _encoder_layer().state_dict().keys()
    for training in (True, False):
        with torch.no_grad():
            torch.testing.assert_close(plain.train(training)(x), expected, rtol=1e-5, atol=1e-5)


def test_files_of_peft(tmp_path: Path) -> None:
    """PEFT adapts both projections where the attention is targeted; its file loads here, and ours there."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    theirs, x = VisionBlock(), torch.randn(2, 4, WIDTH)
    ours, again = copy.deepcopy(theirs), copy.deepcopy(theirs)
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules=["self_attention", "mlp.0"], init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "theirs")
    adapters = onegraph.checkpoint.load(ours, tmp_path / "theirs", name="default")
    assert set(adapters.layers) == {"self_attention", "self_attention.out_proj", "mlp.0"}
    with torch.no_grad():
        expected = wrapped(x)
        torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
        adapters.save(tmp_path / "ours", format="peft")
        torch.testing.assert_close(peft.PeftModel.from_pretrained(again, tmp_path / "ours")(x), expected, rtol=1e-5, atol=1e-5)
