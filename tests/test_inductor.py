"""Inductor itself: the faults that make it train on wrong gradients, the switch against each, and the check that finds it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

import onegraph as og
from onegraph.checking import Report
from onegraph.compiling import eager
from onegraph.errors import MismatchError

CHANNELS = 32
SIZE = 16


class Resnet(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, inputs)
        self.convolution = nn.Conv2d(inputs, CHANNELS, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, CHANNELS, 1)
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shortcut(x) + self.convolution(F.silu(self.norm(x)))
        result: Tensor = h + self.mix(h)
        return result


class Ladder(nn.Module):
    """Down two levels and up again by nearest upsampling, with skips: the shape of a UNet, small enough to compile in a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.ModuleList([Resnet(CHANNELS), Resnet(CHANNELS)])
        self.down = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1) for _ in range(2))
        self.middle = Resnet(CHANNELS)
        self.up = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.exit = nn.ModuleList([Resnet(2 * CHANNELS), Resnet(2 * CHANNELS)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for resnet, down in zip(self.entry, self.down, strict=True):
            x = resnet(x)
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, resnet in zip(self.up, self.exit, strict=True):
            x = up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = resnet(torch.cat([x, skips.pop()], dim=1))
        return x


def checked(*, protect: bool) -> Report:
    torch.manual_seed(0)
    ladder = Ladder().to(torch.bfloat16)
    og.attach(ladder, og.LoRA(rank=4), targets=["mix"])
    og.compile(ladder, backend="inductor", regions="whole", protect=protect)
    return og.check(ladder, torch.randn(1, CHANNELS, SIZE, SIZE, dtype=torch.bfloat16))


@pytest.mark.inductor
def test_protected_gradients_are_right() -> None:
    report = checked(protect=True)
    assert report.right, str(report)
    assert report.graphs == 2


@pytest.mark.inductor
@pytest.mark.skipif("2.13" not in torch.__version__, reason="the fault was seen with torch 2.13; this model may not show it elsewhere")
def test_without_the_protection_the_check_finds_zero_gradients() -> None:
    report = checked(protect=False)
    assert not report.right
    zero = [row for row in report.comparison.faults if row.compiled_norm == 0]
    assert zero
    with pytest.raises(MismatchError, match="exactly zero"):
        report.comparison.raise_if_wrong()


def checked_transformer(*, protect: bool) -> Report:
    torch.manual_seed(0)
    transformer = Transformer2DModel(4, 8, in_channels=32, cross_attention_dim=32, norm_num_groups=8)
    og.attach(transformer, og.LoRA(rank=4), targets=["proj_in", "proj_out", "to_q", "to_v"])
    og.compile(transformer, backend="inductor", regions="whole", protect=protect)
    batch = {"hidden_states": torch.randn(1, 32, 8, 8, requires_grad=True), "encoder_hidden_states": torch.randn(1, 77, 32)}
    return og.check(transformer, batch | {"return_dict": False})


@pytest.mark.inductor
def test_protected_transformer_is_right() -> None:
    report = checked_transformer(protect=True)
    assert report.right, str(report)


@pytest.mark.inductor
@pytest.mark.skipif("2.13" not in torch.__version__, reason="the fault was seen with torch 2.13; it may be gone elsewhere")
def test_without_the_protection_the_check_finds_gradients_that_are_off() -> None:
    report = checked_transformer(protect=False)
    assert any("proj_in" in row.name for row in report.comparison.faults)


class Centred(nn.Module):
    """Rows of a transposed input, less their mean: the smallest thing that the one-row buffer gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = x.permute(0, 2, 3, 1).reshape(1, 16, 96) * self.weight
        for row in y:
            tokens = tokens + row
        return tokens - tokens.mean(-1, keepdim=True)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "protect", [True, pytest.param(False, marks=pytest.mark.skipif("2.13" not in torch.__version__, reason="seen with 2.13"))]
)
def test_rows_of_a_transposed_input_are_right_with_the_protection_only(protect: bool) -> None:
    torch.manual_seed(0)
    centred = Centred()
    x, y = torch.randn(1, 96, 4, 4), torch.randn(6, 1, 16, 96)
    og.compile(centred, backend="inductor", regions="whole", protect=protect)
    with torch.no_grad():
        found = centred(x, y)
        with eager():
            expected = centred(x, y)
    assert bool(torch.allclose(found, expected, atol=1e-5)) == protect


class GatedUnit(nn.Module):
    """What feeds the second product is an activation: cheap to compute again, as large as the widest tensor to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.gate = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


@pytest.mark.inductor
def test_an_adapter_keeps_nothing_for_backward_but_its_own_products() -> None:
    """LoRA's ideal: the frozen model's tensors, and (T, R) a layer. The control: torch's own partitioner keeps an activation."""

    def kept(*, adapted: bool, **options: object) -> int:
        torch._dynamo.reset()
        model = GatedUnit().requires_grad_(False)
        adapters = og.attach(model, og.LoRA(rank=2), targets="all-linear") if adapted else None
        og.compile(model, backend="inductor", regions="whole", **options)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}
        x = torch.randn(128, 16, requires_grad=True)

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(x)
        y.sum().backward()
        del adapters
        return sum(sizes.values())

    frozen = kept(adapted=False)
    ideal = frozen + 3 * 128 * 2 + 128 * 16  # the input itself is kept too: both factors of the first layers read it
    assert kept(adapted=True) <= 1.05 * ideal
    assert kept(adapted=True, options={"custom_partitioner_fn": None}) > ideal + 128 * 64
