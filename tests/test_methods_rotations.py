"""OFT, BOFT, HRA, IA3 and MiSS: what the contract doesn't show. Rotations rotate, PEFT's layers agree, dropouts are masks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.boft import layer as peft_boft
from peft.tuners.boft.config import BOFTConfig
from peft.tuners.hra import layer as peft_hra
from peft.tuners.hra.config import HRAConfig
from peft.tuners.ia3 import layer as peft_ia3
from peft.tuners.ia3.config import IA3Config
from peft.tuners.miss import layer as peft_miss
from peft.tuners.miss.config import MissConfig
from peft.tuners.oft import layer as peft_oft
from peft.tuners.oft.config import OFTConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, Case
from onegraph.adapters import attach
from onegraph.adapters.run import run, run_rows
from onegraph.errors import OnegraphError
from onegraph.layers import Layer, describe
from onegraph.methods import BOFT, HRA, IA3, OFT, Method, MiSS
from reference.boft import butterfly, permutation
from reference.hra import orthogonal_reflections

OWN = ("oft", "boft", "hra", "ia3", "miss")


def described(module: nn.Module) -> Layer:
    layer = describe(module)
    assert layer is not None
    return layer


def tensors(method: Method, layer: Layer, factor: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random parameters, and the settings."""
    p = {name: factor * torch.randn(spec.shape, dtype=dtype) for name, spec in method.parameters(layer).items()}
    return p | {name: torch.tensor(value, dtype=dtype) for name, value in method.settings(layer).items()}


def rotation(method: Method, columns: int, p: Mapping[str, Tensor]) -> Tensor:
    """The dense matrix R of x R: what the identity as a weight becomes, transposed. A gain is left out."""
    layer = described(nn.Linear(columns, columns))
    plain = {**p, "gain": torch.ones(columns, dtype=torch.float64)} if "gain" in p else p
    return method.adapt(torch.eye(columns, dtype=torch.float64), plain, layer).mT


# Orthogonality

ROTATIONS = {
    "oft": OFT(block_size=4, exact=True),
    "oft-shared": OFT(block_size=8, exact=True, block_share=True),
    "oft-coft": OFT(block_size=8, exact=True, coft=True, eps=2.0),
    "boft": BOFT(block_size=4),
    "boft-three": BOFT(block_size=4, num_factors=3),
}
REFLECTIONS = {"hra": HRA(rank=6), "hra-odd": HRA(rank=5), "hra-gram-schmidt": HRA(rank=4, gram_schmidt=True)}


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("method", ROTATIONS.values(), ids=ROTATIONS.keys())
def test_rotations_are_rotations_at_every_scale(method: Method, scale: float) -> None:
    p = {**tensors(method, described(nn.Linear(16, 16))), "scale": torch.tensor(scale)}
    r = rotation(method, 16, p)
    torch.testing.assert_close(r @ r.mT, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.linalg.det(r).item() == pytest.approx(1.0)
    assert not torch.allclose(r, torch.eye(16, dtype=torch.float64), atol=0.1)


@pytest.mark.parametrize("method", REFLECTIONS.values(), ids=REFLECTIONS.keys())
def test_reflections_are_orthogonal_as_trained(method: HRA) -> None:
    p = tensors(method, described(nn.Linear(16, 16)))
    r = rotation(method, 16, p)
    torch.testing.assert_close(r @ r.mT, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.linalg.det(r).item() == pytest.approx((-1.0) ** method.rank)


def test_more_terms_are_nearer_to_a_rotation() -> None:
    p = {"rotation": 0.05 * torch.randn(4, 28, dtype=torch.float64), "scale": torch.tensor(1.0)}
    errors = []
    for num_terms in (5, 7, 9, 11):
        r = rotation(OFT(block_size=8, num_terms=num_terms), 32, p)
        errors.append((r @ r.mT - torch.eye(32, dtype=torch.float64)).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3  # the first is none, or the test would say nothing
    assert errors[-1] < 1e-5


def test_the_series_is_near_the_inverse_of_the_exact_rotation() -> None:
    p = {"rotation": 0.05 * torch.randn(4, 28, dtype=torch.float64), "scale": torch.tensor(1.0)}
    exact, near = (rotation(OFT(block_size=8, exact=flag, num_terms=12), 32, p) for flag in (True, False))
    torch.testing.assert_close(near, exact.mT, rtol=0, atol=1e-6)
    assert not torch.allclose(near, exact, atol=1e-2)


# Scale


@pytest.mark.parametrize("case", [CASES[name] for name in CASES if name.startswith(OWN)], ids=[n for n in CASES if n.startswith(OWN)])
def test_another_scale_agrees_with_weight_and_reference(case: Case) -> None:
    module, layer, x, p = case.build()
    p = {**p, "scale": torch.tensor(-0.7, dtype=torch.float64)}
    found = case.run(module, layer, x, p)
    expected = case.method_case.reference(module, x.numpy(), {name: value.numpy() for name, value in p.items()})
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)
    adapted = case.method.adapt_tensors(layer.base_tensors(module), p, layer)
    torch.testing.assert_close(layer.call(module, adapted, x), found, rtol=1e-10, atol=1e-10)


# PEFT


def _quiet(build: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it can't build its extension
        return build()


def compare(
    peft_layer: nn.Module, method: Method, names: Mapping[str, str], x: Tensor, *, forward: bool = True, factor: float = 0.2
) -> None:
    """Ours against a layer of PEFT with the same random tensors: output, merged weight, and what the merged layer computes."""
    base = peft_layer.get_base_layer().requires_grad_(False)  # type: ignore[operator]
    layer = described(base)
    p = {name: torch.tensor(value) for name, value in method.settings(layer).items()}
    theirs = dict(peft_layer.named_parameters())
    for name, spec in method.parameters(layer).items():
        value = theirs[names[name]]
        with torch.no_grad():
            value.add_(factor * torch.randn(value.shape))
        p[name] = value.detach().clone().reshape(spec.shape)
    before = {name: value.clone() for name, value in layer.base_tensors(base).items()}
    ours = run(method, layer, base, x, p, training=False)
    assert not torch.allclose(ours, base(x), atol=1e-3)
    if forward:
        torch.testing.assert_close(ours, peft_layer(x).detach(), rtol=1e-5, atol=2e-6)
    peft_layer.merge()  # type: ignore[operator]
    merged = layer.base_tensors(base)
    adapted = method.adapt_tensors(before, p, layer)
    torch.testing.assert_close(adapted, {name: value.detach() for name, value in merged.items()}, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours, base(x), rtol=1e-5, atol=5e-6)


def peft_oft_layer(base: nn.Module, **settings: Any) -> nn.Module:
    kind = {nn.Linear: peft_oft.Linear, nn.Conv2d: peft_oft.Conv2d, nn.Embedding: peft_oft.Embedding}[type(base)]
    config = OFTConfig(**settings)
    return _quiet(lambda: kind(base, "default", config=config, r=config.r))


OFT_PAIRS: dict[str, tuple[OFT, dict[str, Any]]] = {
    "exact": (OFT(block_size=4, exact=True), {"oft_block_size": 4, "use_cayley_neumann": False}),
    "series": (OFT(block_size=4), {"oft_block_size": 4}),
    "two-terms": (OFT(block_size=4, num_terms=2), {"oft_block_size": 4, "num_cayley_neumann_terms": 2}),
    "three-terms": (OFT(block_size=4, num_terms=3), {"oft_block_size": 4, "num_cayley_neumann_terms": 3}),
    "four-terms": (OFT(block_size=4, num_terms=4), {"oft_block_size": 4, "num_cayley_neumann_terms": 4}),
    "seven-terms": (OFT(block_size=4, num_terms=7), {"oft_block_size": 4, "num_cayley_neumann_terms": 7}),
    "shared": (OFT(block_size=6, block_share=True), {"oft_block_size": 6, "block_share": True}),
    "number-of-blocks": (OFT(num_blocks=6), {"r": 6, "oft_block_size": 0}),
    "bounded": (OFT(block_size=4, coft=True, eps=0.9), {"oft_block_size": 4, "coft": True, "eps": 0.9}),
    "bounded-shared": (
        OFT(block_size=4, coft=True, eps=0.4, block_share=True),
        {"oft_block_size": 4, "coft": True, "eps": 0.4, "block_share": True},
    ),
}


@pytest.mark.parametrize("pair", OFT_PAIRS.values(), ids=OFT_PAIRS.keys())
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_oft_equals_peft(kind: str, pair: tuple[OFT, dict[str, Any]]) -> None:
    base, x = {
        "linear": (nn.Linear(12, 7), torch.randn(2, 3, 12)),
        "conv": (nn.Conv2d(12, 7, 1, stride=2), torch.randn(2, 12, 5, 4)),
    }[kind]
    compare(peft_oft_layer(base, **pair[1]), pair[0], {"rotation": "oft_R.default.weight"}, x)


def test_oft_on_embeddings_equals_peft() -> None:
    peft_layer = peft_oft_layer(nn.Embedding(9, 12), oft_block_size=4)
    compare(peft_layer, OFT(block_size=4), {"rotation": "oft_embedding_R.default.weight"}, torch.randint(0, 9, (2, 5)))


def test_oft_on_kernels_equals_what_peft_merges_and_not_what_it_runs() -> None:
    base, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 5, 5)
    peft_layer = peft_oft_layer(base, oft_block_size=4)
    compare(peft_layer, OFT(block_size=4), {"rotation": "oft_R.default.weight"}, x, forward=False)
    merged = base(x).detach()
    peft_layer.unmerge()  # type: ignore[operator]
    assert not torch.allclose(peft_layer(x), merged, atol=0.1)  # peft's layer disagrees with its own merged weight


def peft_boft_layer(base: nn.Module, **settings: Any) -> nn.Module:
    kind = {nn.Linear: peft_boft.Linear, nn.Conv2d: peft_boft.Conv2d}[type(base)]
    return _quiet(lambda: kind(base, "default", config=BOFTConfig(**settings)))


BOFT_NAMES = {"rotation": "boft_R.default", "gain": "boft_s.default"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{"block_size": 4}, {"num_blocks": 2}])
def test_boft_equals_peft(settings: dict[str, int], bias: bool) -> None:
    theirs = {f"boft_{name.replace('num_blocks', 'block_num')}": value for name, value in settings.items()}
    peft_layer = peft_boft_layer(nn.Linear(12, 7, bias=bias), **{"boft_block_size": 0, **theirs})
    compare(peft_layer, BOFT(**settings), BOFT_NAMES, torch.randn(2, 3, 12), factor=0.5)


def test_boft_on_convolutions_equals_peft() -> None:
    peft_layer = peft_boft_layer(nn.Conv2d(4, 6, 3, padding=1, stride=2), boft_block_size=4)
    compare(peft_layer, BOFT(block_size=4), BOFT_NAMES, torch.randn(2, 4, 5, 5), factor=0.5)


class _BlockDiagonal:
    """What PEFT's CUDA extension computes, so that its butterfly can run without it."""

    @staticmethod
    def apply(blocks: Tensor) -> Tensor:
        return torch.stack([torch.block_diag(*stage) for stage in blocks])


@pytest.mark.parametrize("num_factors", [2, 3])
def test_the_butterfly_equals_peft(num_factors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_boft, "get_fbd_cuda", lambda: True)
    monkeypatch.setattr(peft_boft, "FastBlockDiag", _BlockDiagonal)
    peft_layer = peft_boft_layer(nn.Linear(32, 6), boft_block_size=4, boft_n_butterfly_factor=num_factors)
    assert peft_layer.boft_R["default"].shape[0] == num_factors  # type: ignore[index,union-attr]
    compare(peft_layer, BOFT(block_size=4, num_factors=num_factors), BOFT_NAMES, torch.randn(3, 32), factor=0.5)


def test_the_first_stage_is_not_shuffled() -> None:
    assert np.array_equal(permutation(24, 4, 0), np.eye(24))
    assert not np.array_equal(permutation(24, 4, 1), np.eye(24))


def peft_hra_layer(base: nn.Module, rank: int, **settings: Any) -> nn.Module:
    kind = {nn.Linear: peft_hra.HRALinear, nn.Conv2d: peft_hra.HRAConv2d}[type(base)]
    return _quiet(lambda: kind(base, "default", config=HRAConfig(r=rank, **settings), r=rank))


@pytest.mark.parametrize("gram_schmidt", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_hra_equals_peft(kind: str, rank: int, gram_schmidt: bool) -> None:
    base, x = {
        "linear": (nn.Linear(12, 7), torch.randn(2, 3, 12)),
        "conv": (nn.Conv2d(4, 6, 3, padding=1, stride=2), torch.randn(2, 4, 5, 5)),
    }[kind]
    peft_layer = peft_hra_layer(base, rank, apply_GS=gram_schmidt)
    compare(peft_layer, HRA(rank=rank, gram_schmidt=gram_schmidt), {"vectors": "hra_u.default"}, x, factor=1.0)


def test_hra_where_peft_divides_by_zero() -> None:
    base, x = nn.Linear(12, 7).double().requires_grad_(False), torch.randn(3, 12, dtype=torch.float64)
    vectors = torch.randn(12, 1, dtype=torch.float64).repeat(1, 2)  # PEFT's start: every vector twice
    peft_layer = peft_hra_layer(nn.Linear(12, 7), 2, apply_GS=True)
    peft_layer.hra_u["default"].data.copy_(torch.eye(12)[:, :1].repeat(1, 2))  # type: ignore[index,union-attr]
    assert peft_layer(x.float()).isnan().any()
    p = {"vectors": vectors.requires_grad_(), "scale": torch.tensor(1.0)}
    found = run(HRA(rank=2, gram_schmidt=True), described(base), base, x, p, training=False)
    expected = base.weight.numpy() @ orthogonal_reflections(vectors.detach().numpy())
    np.testing.assert_allclose(found.detach().numpy(), x.numpy() @ expected.T + base.bias.numpy(), rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv", "conv-grouped", "conv3d"])
def test_ia3_equals_peft(kind: str, on_input: bool) -> None:
    base, peft_kind, x = {
        "linear": (nn.Linear(5, 7), peft_ia3.Linear, torch.randn(2, 3, 5)),
        "conv": (nn.Conv2d(4, 6, 3, padding=1), peft_ia3.Conv2d, torch.randn(2, 4, 5, 5)),
        "conv-grouped": (nn.Conv2d(4, 6, 3, padding=1, groups=2), peft_ia3.Conv2d, torch.randn(2, 4, 5, 5)),
        "conv3d": (nn.Conv3d(2, 4, 2), peft_ia3.Conv3d, torch.randn(2, 2, 3, 3, 3)),
    }[kind]
    peft_layer = peft_kind(base, "default", config=IA3Config(), is_feedforward=on_input)
    compare(peft_layer, IA3(on_input=on_input), {"gain": "ia3_l.default"}, x, factor=0.5)


MISS_PAIRS: dict[str, tuple[MiSS, dict[str, Any]]] = {
    "balance": (MiSS(rank=4), {"r": 4}),
    "balance-uneven": (MiSS(rank=5), {"r": 5}),
    "mini": (MiSS(rank=4, form="mini", out_rank=2), {"r": 4, "init_weights": "mini", "mini_r": 2}),
    "mini-uneven": (MiSS(rank=5, form="mini", out_rank=8), {"r": 5, "init_weights": "mini", "mini_r": 8}),
    "bat": (MiSS(rank=4, form="bat"), {"r": 4, "init_weights": "bat"}),
}


@pytest.mark.parametrize("pair", MISS_PAIRS.values(), ids=MISS_PAIRS.keys())
def test_miss_equals_peft(pair: tuple[MiSS, dict[str, Any]]) -> None:
    config = MissConfig(**pair[1])
    peft_layer = peft_miss.MissLinear(nn.Linear(12, 8), "default", config=config, r=config.r)
    compare(peft_layer, pair[0], {"block": "miss_block.default"}, torch.randn(2, 3, 12))


# Butterflies


@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize("num_factors", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_long_butterflies_equal_the_dense_product(kind: str, num_factors: int, columns: int) -> None:
    """Beyond 64 columns the stages run one by one."""
    module = (nn.Linear(columns, 3) if kind == "linear" else nn.Conv2d(columns, 3, 1)).double().requires_grad_(False)
    layer, method = described(module), BOFT(block_size=4, num_factors=num_factors)
    x = torch.randn(5, columns, dtype=torch.float64) if kind == "linear" else torch.randn(2, columns, 2, 3, dtype=torch.float64)
    p = tensors(method, layer)
    dense = module.weight.flatten(1) @ torch.from_numpy(butterfly(p["rotation"].numpy(), 1.0)).mT * p["gain"][:, None]
    torch.testing.assert_close(method.adapt(module.weight, p, layer).flatten(1), dense, rtol=1e-10, atol=1e-10)
    expected = layer.call(module, {"weight": dense.reshape(module.weight.shape), "bias": module.bias}, x)
    torch.testing.assert_close(run(method, layer, module, x, p, training=False), expected, rtol=1e-10, atol=1e-10)


class _Created(TorchDispatchMode):
    """The dtype and size of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.seen.append((value.dtype, value.numel()))
        return result


@pytest.mark.parametrize(
    "method",
    [OFT(block_size=8), OFT(block_size=8, exact=True), BOFT(block_size=8), BOFT(block_size=8, num_factors=5), HRA(rank=4)],
    ids=str,
)
def test_no_square_matrix_is_formed(method: Method) -> None:
    module = nn.Linear(512, 4)
    layer = described(module)
    p = tensors(method, layer, 0.1, torch.float32)
    with _Created() as made:
        run(method, layer, module, torch.randn(3, 512), p, training=False)
    assert max(size for _, size in made.seen) <= 512 * 64  # a matrix of 512 x 512 has eight times that


# HRA


def test_padding_with_zero_columns_is_exact_and_gets_no_gradient() -> None:
    for gram_schmidt in (False, True):
        method, wide = HRA(rank=3, gram_schmidt=gram_schmidt), HRA(rank=8, gram_schmidt=gram_schmidt)
        for module, x in ((nn.Linear(12, 7), torch.randn(4, 12)), (nn.Conv2d(3, 5, 2), torch.randn(2, 3, 4, 4))):
            layer = described(module.requires_grad_(False))
            p = tensors(method, layer, dtype=torch.float32)
            padded = nn.functional.pad(p["vectors"], (0, 5)).requires_grad_()
            expected = run(method, layer, module, x, p, training=False)
            found = run(wide, layer, module, x, {**p, "vectors": padded}, training=False)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            found.square().sum().backward()
            assert padded.grad is not None
            assert torch.equal(padded.grad[:, 3:], torch.zeros_like(padded.grad[:, 3:]))
            assert padded.grad[:, :3].abs().min() > 0


def test_pairs_start_as_the_identity_and_can_be_trained() -> None:
    method, module, x = HRA(rank=4), nn.Linear(12, 7).requires_grad_(False), torch.randn(4, 12)
    layer = described(module)
    vectors = method.initial(layer, module.weight, torch.Generator().manual_seed(0))["vectors"].requires_grad_()
    found = run(method, layer, module, x, {"vectors": vectors, "scale": torch.tensor(1.0)}, training=True)
    torch.testing.assert_close(found, module(x))
    found.square().sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.abs().min() > 0


def test_reflections_of_an_odd_number_start_with_one_left() -> None:
    layer = described(nn.Linear(12, 7))
    vectors = HRA(rank=5).initial(layer, torch.zeros(7, 12), torch.Generator().manual_seed(0))["vectors"]
    assert torch.equal(vectors[:, 0:4:2], vectors[:, 1:4:2])
    assert vectors[:, 4].abs().min() > 0


# Dropouts


def test_module_dropout_leaves_blocks_as_they_are() -> None:
    method, module, x = (
        OFT(block_size=2, exact=True, module_dropout=0.4),
        nn.Linear(12, 5).double().requires_grad_(False),
        torch.randn(4, 12),
    )
    layer, x = described(module), x.double()
    p = tensors(method, layer)
    plain = method.before(x, p, layer, training=False)
    drawn = set()
    for seed in range(30):
        torch.manual_seed(seed)
        found = method.before(x, p, layer, training=True)
        kept = []
        for block in range(6):
            part = slice(2 * block, 2 * block + 2)
            rotated = torch.allclose(found[:, part], plain[:, part])
            assert rotated or torch.equal(found[:, part], x[:, part])
            kept.append(rotated)
        drawn.add(tuple(kept))
    assert len(drawn) > 10


@pytest.mark.parametrize(
    ("method", "module"),
    [
        (OFT(block_size=3, exact=True, block_share=True, module_dropout=0.5), nn.Linear(12, 6)),
        (OFT(block_size=2, exact=True, module_dropout=0.5), nn.Conv2d(4, 6, 3)),
        (OFT(block_size=3, exact=True, module_dropout=0.5), nn.Embedding(7, 6)),
        (BOFT(block_size=2, num_factors=2, block_dropout=0.5), nn.Linear(12, 6)),
        (MiSS(rank=4, input_dropout=0.5), nn.Linear(12, 6)),
    ],
    ids=["oft-shared", "oft-by-weight", "oft-embedding", "boft", "miss"],
)
def test_dropouts_only_in_training_and_off_at_zero(method: Method, module: nn.Module) -> None:
    module = module.double().requires_grad_(False)
    layer = described(module)
    x = (
        torch.randint(0, 7, (3, 4))
        if layer.kind == "embedding"
        else torch.randn(3, 4, 6, 6).double()
        if layer.kind == "conv"
        else torch.randn(3, 12).double()
    )
    p = tensors(method, layer)
    (setting,) = method.random_settings
    without = {name: value for name, value in p.items() if name != setting}
    plain = run(method, layer, module, x, without, training=True)
    state = torch.get_rng_state()
    assert torch.equal(run(method, layer, module, x, p, training=False), plain)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    torch.testing.assert_close(run(method, layer, module, x, {**p, setting: torch.zeros(())}, training=True), plain)
    assert any(not torch.allclose(run(method, layer, module, x, p, training=True), plain) for _ in range(10))
    rows = {name: value.expand(len(x), *value.shape) for name, value in p.items()}
    run_rows([(method, rows)], layer, module, x, training=True)  # vmap draws too


def test_block_dropout_is_in_one_stage_at_a_time() -> None:
    method, layer = BOFT(block_size=2, num_factors=3, block_dropout=0.999), described(nn.Linear(8, 8))
    p = {**tensors(method, layer), "gain": torch.ones(8, dtype=torch.float64)}
    whole = p["rotation"]
    without = []
    for stage in range(3):
        rest = whole.clone()
        rest[stage] = 0
        without.append(rotation(method, 8, {**p, "rotation": rest}))
    seen = set()
    for seed in range(25):
        torch.manual_seed(seed)
        found = method.before(torch.eye(8, dtype=torch.float64), p, layer, training=True)
        matches = [stage for stage in range(3) if torch.allclose(found, without[stage])]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == {0, 1, 2}


def test_miss_drops_elements_of_the_input() -> None:
    method, module, x = MiSS(rank=4, input_dropout=0.25), nn.Linear(12, 6).double(), torch.randn(3, 12).double()
    layer = described(module)
    p = tensors(method, layer)
    torch.manual_seed(5)
    mask = (torch.rand(3, 12) >= 0.25).double() / 0.75
    expected = module(x) + (x * mask).reshape(3, 3, 4).sum(1) @ p["block"]
    torch.manual_seed(5)
    torch.testing.assert_close(run(method, layer, module, x, p, training=True), expected)


# Half precision

HALF: dict[str, tuple[Method, nn.Module]] = {
    "oft": (OFT(block_size=8), nn.Linear(64, 48)),
    "oft-exact": (OFT(block_size=8, exact=True), nn.Linear(64, 48)),
    "oft-conv": (OFT(block_size=8), nn.Conv2d(64, 48, 1)),
    "oft-embedding": (OFT(block_size=8), nn.Embedding(64, 48)),
    "oft-on-output": (OFT(block_size=8, on_output=True), nn.Linear(64, 48)),
    "boft": (BOFT(block_size=4, num_factors=2), nn.Linear(64, 48)),
    "boft-on-output": (BOFT(block_size=6, num_factors=2, on_output=True), nn.Linear(64, 48)),
    "hra": (HRA(rank=4), nn.Linear(64, 48)),
    "hra-conv": (HRA(rank=4), nn.Conv2d(64, 48, 3, padding=1)),
    "ia3": (IA3(), nn.Linear(64, 48)),
    "ia3-on-input": (IA3(on_input=True), nn.Linear(64, 48)),
    "ia3-without-bias": (IA3(scales_bias=False), nn.Linear(64, 48)),
    "miss": (MiSS(rank=8), nn.Linear(64, 48)),
    "miss-mini": (MiSS(rank=8, form="mini", out_rank=4), nn.Linear(64, 48)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_base_with_a_float32_adapter(name: str, autocast: bool, dtype: torch.dtype) -> None:
    method, module = HALF[name]
    module = module.to(dtype).requires_grad_(False)
    layer = described(module)
    x = {"linear": (64, 32, 64), "conv": (8, 64, 16, 16)}.get(layer.kind, ())
    given = torch.randn(x).to(dtype).requires_grad_() if x else torch.randint(0, 64, (32, 128))
    p = tensors(method, layer, 0.1, torch.float32)
    parameters = {key: value.requires_grad_() for key, value in p.items() if key in method.parameters(layer)}
    with torch.autocast("cpu", dtype=dtype, enabled=autocast), _Created() as forward:
        found = run(method, layer, module, given, p, training=True)
    assert found.dtype == dtype
    found.float().square().mean().backward()
    assert all(
        value.grad is not None and value.grad.dtype == torch.float32 and value.grad.isfinite().all() for value in parameters.values()
    )
    limit = min(found.numel(), given.numel())
    full = [size for kind, size in forward.seen if kind == torch.float32 and size >= limit]
    assert not full, f"float32 tensors as large as an activation: {full}"
    exact = method.adapt_tensors(
        {key: value.double() for key, value in layer.base_tensors(module).items()},
        {key: value.detach().double() for key, value in p.items()},
        layer,
    )
    expected = layer.call(module.double(), exact, given.detach().double() if given.is_floating_point() else given)
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", HALF)
def test_off_is_off_bit_for_bit_in_half_precision(name: str, autocast: bool) -> None:
    method, module = HALF[name]
    module = module.to(torch.float32 if autocast else torch.bfloat16).requires_grad_(False)
    layer = described(module)
    x = {"linear": (4, 64), "conv": (2, 64, 4, 4)}.get(layer.kind, ())
    given = torch.randn(x).to(module.weight.dtype) if x else torch.randint(0, 64, (32,))
    p = {**tensors(method, layer, 0.1, torch.float32), "scale": torch.zeros(())}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert torch.equal(run(method, layer, module, given, p, training=False), module(given))


def test_rounding_gives_no_feature_a_gain() -> None:
    layer, method = described(nn.Linear(64, 64)), OFT(block_size=8, exact=True)
    p = tensors(method, layer, 0.05, torch.float32)
    x = torch.randn(8192, 64).bfloat16()
    exact = rotation(method, 64, {name: value.double() for name, value in p.items()})
    gains = []
    for found in (method.before(x, p, layer, training=False), x @ exact.bfloat16()):  # ours; the matrix rounded as a whole
        error = found.double() - x.double() @ exact
        gains.append(((error * x).sum(0) / x.double().square().sum(0)).abs().mean().item())
    assert gains[0] < 1e-4
    assert gains[1] > 5e-4


# Compiling


COMPILED: dict[str, Method] = {
    "oft-dropout": OFT(block_size=4, module_dropout=0.2),
    "oft-exact": OFT(block_size=4, exact=True),
    "oft-coft-shared": OFT(block_size=4, coft=True, block_share=True),
    "boft-three-dropout": BOFT(block_size=4, num_factors=3, block_dropout=0.2),
    "hra": HRA(rank=4),
    "hra-gram-schmidt": HRA(rank=3, gram_schmidt=True),
    "ia3": IA3(),
    "ia3-on-input": IA3(on_input=True),
    "miss-dropout": MiSS(rank=5, input_dropout=0.2),
    "miss-mini": MiSS(rank=4, form="mini", out_rank=2),
    "miss-any-rank": MiSS(rank=4, any_rank=True, input_dropout=0.2),
    "miss-bat": MiSS(rank=4, form="bat"),
}


@pytest.mark.parametrize("name", [*COMPILED, "oft-exact/autocast", "boft-three-dropout/autocast", "hra/autocast", "miss-mini/autocast"])
def test_one_graph_with_the_same_gradients(name: str) -> None:
    method, autocast = COMPILED[name.removesuffix("/autocast")], name.endswith("/autocast")
    module = nn.Linear(16, 8).requires_grad_(False)
    layer, x = described(module), torch.randn(6, 16, requires_grad=True)
    p = tensors(method, layer, 0.3, torch.float32)
    inputs = [x, *(value.requires_grad_() for name, value in p.items() if name in method.parameters(layer))]

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return run(method, layer, module, x, p, training=True).float().square().sum()

    found = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        loss = function()
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)


def test_switching_adapters_recompiles_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    adapters = attach(model, OFT(block_size=4), targets=["0", "2"], name="a")
    adapters.add("b", OFT(block_size=4, module_dropout=0.0))
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(3, 16)
    with torch.no_grad():
        for name in ("a", "b", None, "a"):
            adapters.use(name)
            compiled(x)
        adapters.scale("a", 0.5)
        compiled(x)
    assert counter.frame_count == 1


# Refusals


@pytest.mark.parametrize(
    ("method", "module", "words"),
    [
        (OFT(block_size=5), nn.Linear(12, 4), ["12 columns", "blocks of 5", "block_size can be 2, 3, 4, 6, 12"]),
        (OFT(), nn.Linear(48, 4), ["blocks of 32", "2, 3, 4, 6, 8, 12, 16, 24, 48"]),
        (OFT(num_blocks=5), nn.Linear(12, 4), ["5 blocks", "num_blocks can be 1, 2, 3, 4, 6"]),
        (OFT(block_size=5), nn.Conv2d(2, 4, 3), ["18 columns", "2, 3, 6, 9, 18"]),
        (OFT(block_size=4), nn.Embedding(8, 6), ["6 columns", "2, 3, 6"]),
        (OFT(block_size=2, on_output=True), nn.Conv2d(4, 4, 3, groups=2), ["2 groups"]),
        (BOFT(block_size=5), nn.Linear(12, 4), ["blocks of 5", "2, 3, 4, 6, 12"]),
        (BOFT(block_size=3, num_factors=2), nn.Linear(12, 4), ["blocks of 3", "block_size can be 2, 6"]),
        (BOFT(block_size=4, num_factors=3), nn.Linear(24, 4), ["blocks of 4", "block_size can be 2, 6"]),
        (BOFT(block_size=2, num_factors=2), nn.Linear(7, 4), ["no size can"]),
        (BOFT(), nn.Embedding(8, 8), ["embedding"]),
        (HRA(), nn.Embedding(8, 8), ["embedding"]),
        (IA3(on_input=True), nn.Embedding(8, 8), ["ids"]),
        (MiSS(rank=9), nn.Linear(8, 8), ["rank=9", "8 input features"]),
        (MiSS(rank=4, form="bat"), nn.Linear(12, 6), ["12 inputs and 6 outputs", "1, 2, 3, 6"]),
        (MiSS(rank=2, form="mini", out_rank=4), nn.Linear(8, 6), ["out_rank=4", "1, 2, 3, 6"]),
        (MiSS(rank=2), nn.Conv2d(4, 4, 1), ["conv"]),
    ],
    ids=str,
)
def test_layers_that_do_not_fit(method: Method, module: nn.Module, words: list[str]) -> None:
    reason = method.check(described(module))
    assert reason is not None
    assert all(word in reason for word in words), reason
    model = nn.Sequential(module)
    with pytest.raises(OnegraphError) as raised:
        attach(model, method, targets=["0"])
    assert raised.value.code == "unsupported-layer"
    assert reason in str(raised.value)
    assert model[0] is module


@pytest.mark.parametrize(
    ("kind", "settings", "code"),
    [
        (OFT, {"block_size": 1}, "whole-number"),
        (OFT, {"block_size": 2.0}, "whole-number"),
        (OFT, {"num_blocks": 0}, "whole-number"),
        (OFT, {"block_size": 4, "num_blocks": 2}, "blocks"),
        (OFT, {"num_terms": 1}, "whole-number"),
        (OFT, {"eps": 0.0}, "eps"),
        (OFT, {"eps": math.nan}, "eps"),
        (OFT, {"module_dropout": 1.0}, "probability"),
        (BOFT, {"block_size": True}, "whole-number"),
        (BOFT, {"num_factors": 0}, "whole-number"),
        (BOFT, {"block_size": 4, "num_blocks": 2}, "blocks"),
        (BOFT, {"block_dropout": -0.1}, "probability"),
        (HRA, {"rank": 0}, "rank"),
        (MiSS, {"rank": 0}, "rank"),
        (MiSS, {"form": "bath"}, "form"),
        (MiSS, {"form": "mini", "out_rank": 0}, "whole-number"),
        (MiSS, {"out_rank": 2}, "miss-form"),
        (MiSS, {"form": "bat", "input_dropout": 0.1}, "miss-form"),
        (MiSS, {"form": "bat", "any_rank": True}, "miss-form"),
        (MiSS, {"input_dropout": 2.0}, "probability"),
    ],
    ids=str,
)
def test_bad_settings(kind: type[Method], settings: dict[str, Any], code: str) -> None:
    with pytest.raises(OnegraphError) as raised:
        kind(**settings)
    assert raised.value.code == code
    assert repr(list(settings.values())[-1]) in str(raised.value)


def test_structures() -> None:
    assert OFT(module_dropout=0.5).structure() == OFT(block_size=32).structure()
    assert OFT(block_size=8).structure() != OFT(block_size=4).structure()
    assert BOFT(block_dropout=0.5).structure() == BOFT().structure()
    assert HRA(rank=3).structure() == HRA(rank=8).structure()
    assert HRA(gram_schmidt=True).structure() != HRA().structure()
    assert MiSS(rank=3).structure() != MiSS(rank=4).structure()
    assert MiSS().additive
    assert not MiSS(form="bat").additive
    assert OFT(on_output=True).reads_base
    assert not OFT().reads_base
