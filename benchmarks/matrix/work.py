"""The work that both libraries do: a model, the adapters of each method, and what a cell of the matrix says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.compiling import Watch
from onegraph.layers import describe_any
from onegraph.methods import METHODS, Dense, Method

WIDTH, VOCABULARY, POSITIONS, ROWS = 16, 32, 6, 4
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 2e-4
"""Of the largest element, in float32: another adapter, scale or slot is off by as much as the values are."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.query(self.norm(x))))


class Model(nn.Module):
    """Two equal blocks and a head."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> Model:
    """The base model, the same every time."""
    model, generator = Model(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


IDS = torch.randint(0, VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Case:
    """The adapters of one method: "a", "b" of another rank on fewer layers, "c" like "a".

    Args:
        name: The method.
        first: Fields of "a" and "c".
        second: Fields of "b" that differ; without a rank it differs in its layers only.
        peft: From these fields to PEFT's configuration; None: PEFT has no such method.
        targets: Ends of the paths.
        dropout: A dropout of the method, ours -> PEFT's name for it.
        room: The rank that room is asked for, of a method that another rank would give another graph.
        no_rank: Why there is no adapter of another rank on the same graph.
        no_peft: Why PEFT has nothing to compare with.
        one_rank: Whether PEFT can't hold adapters of two ranks at once; its "b" then has the rank of "a".
        one_place: Whether it can't hold adapters on different layers; its "b" is then where "a" is.
        alone: Whether it can't hold a second adapter at all.
        inner: The method inside, of one that stands beside another; the fields are its.
    """

    name: str
    first: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)
    peft: Callable[..., Any] | None = None
    targets: tuple[str, ...] = ("query", "up")
    dropout: tuple[str, str | None] | None = None
    room: int | None = None
    no_rank: str | None = None
    no_peft: str = ""
    one_rank: bool = False
    one_place: bool = False
    alone: bool = False
    inner: str | None = None

    @property
    def fewer(self) -> list[str]:
        """The layers of "b"."""
        return [f"blocks.{block}.{self.targets[0]}" for block in (0, 1)] if len(self.targets) > 1 else ["blocks.1." + self.targets[0]]

    def method(self, name: str = "a", **more: Any) -> Method:
        """The method of an adapter."""
        fields = {**self.first, **(self.second if name == "b" else {}), **more}
        return METHODS[self.name](**fields) if self.inner is None else METHODS[self.name](inner=METHODS[self.inner](**fields))

    def where(self, name: str) -> list[str]:
        """The targets of an adapter."""
        return self.fewer if name == "b" else list(self.targets)

    def config(self, name: str = "a", **more: Any) -> Any:
        """PEFT's configuration for the same adapter."""
        assert self.peft is not None
        second = self.second if name == "b" and not self.one_rank else {}
        return self.peft({**self.first, **second, "targets": self.where("a" if self.one_place else name)}, **more)


def _lora(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=f["rank"], lora_alpha=f["alpha"], target_modules=f["targets"], **more)


def _dora(f: Mapping[str, Any], **more: Any) -> Any:
    return _lora(f, use_dora=True, **more)


def _with_bias(f: Mapping[str, Any], **more: Any) -> Any:
    return _lora(f, bias="lora_only", **more)


def _adalora(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import AdaLoraConfig

    return AdaLoraConfig(init_r=f["rank"], target_r=f["rank"], lora_alpha=f["alpha"], total_step=100, target_modules=f["targets"], **more)


def _ia3(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import IA3Config

    return IA3Config(target_modules=f["targets"], feedforward_modules=[], **more)


def _norm_tuning(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import LNTuningConfig

    return LNTuningConfig(target_modules=f["targets"], **more)


def _loha(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import LoHaConfig

    return LoHaConfig(r=f["rank"], alpha=f["alpha"], target_modules=f["targets"], **more)


def _lokr(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import LoKrConfig

    return LoKrConfig(r=f["rank"], alpha=f["alpha"], decompose_factor=f["decompose_factor"], target_modules=f["targets"], **more)


def _vera(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import VeraConfig

    return VeraConfig(r=f["rank"], target_modules=f["targets"], **more)


def _vblora(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import VBLoRAConfig

    return VBLoRAConfig(r=f["rank"], num_vectors=f["num_vectors"], vector_length=f["vector_length"], target_modules=f["targets"], **more)


def _oft(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import OFTConfig

    return OFTConfig(r=0, oft_block_size=f["block_size"], target_modules=f["targets"], **more)


def _boft(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import BOFTConfig

    return BOFTConfig(boft_block_size=f["block_size"], boft_n_butterfly_factor=f["num_factors"], target_modules=f["targets"], **more)


def _hra(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import HRAConfig

    return HRAConfig(r=f["rank"], target_modules=f["targets"], **more)


def _miss(f: Mapping[str, Any], **more: Any) -> Any:
    from peft import MissConfig

    return MissConfig(r=f["rank"], target_modules=f["targets"], **more)


_RANKS = {"first": {"rank": 4, "alpha": 6.0}, "second": {"rank": 2, "alpha": 5.0}}
_BLOCKS = "no rank; the block size says which columns turn together, and another one is another graph"

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("lora", **_RANKS, peft=_lora, dropout=("input_dropout", "lora_dropout")),
        Case("dora", **_RANKS, peft=_dora, dropout=("input_dropout", "lora_dropout")),
        Case("with_bias", **_RANKS, peft=_with_bias, dropout=("input_dropout", "lora_dropout"), alone=True, inner="lora"),
        Case("adalora", **_RANKS, peft=_adalora, dropout=("input_dropout", "lora_dropout")),
        Case("ia3", peft=_ia3, no_rank="a gain has no rank"),
        Case("norm_tuning", peft=_norm_tuning, one_place=True, targets=("norm",), no_rank="a norm's vectors have no rank"),
        Case("loha", **_RANKS, peft=_loha, dropout=("rank_dropout", "rank_dropout")),
        Case(
            "lokr",
            # From half of the larger side on, here 4, the second matrix is full: with room, that is on the same graph.
            first={"rank": 3, "alpha": 6.0, "decompose_factor": 2},
            second={"rank": 2, "alpha": 5.0},
            room=6,
            peft=_lokr,
            dropout=("rank_dropout", "rank_dropout"),
        ),
        Case("vera", first={"rank": 4}, second={"rank": 2}, peft=_vera, one_rank=True, dropout=("input_dropout", "vera_dropout")),
        Case("oft", first={"block_size": 4}, peft=_oft, dropout=("module_dropout", "module_dropout"), no_rank=_BLOCKS),
        Case(
            "boft",
            first={"block_size": 4, "num_factors": 1},  # PEFT without its CUDA extension has no more
            peft=_boft,
            dropout=("block_dropout", "boft_dropout"),
            no_rank=_BLOCKS,
        ),
        Case("hra", first={"rank": 4}, second={"rank": 2}, peft=_hra),
        Case("dense", no_rank="a full difference has no rank", no_peft="no method of its own: modules_to_save stands beside another one"),
        Case("bitfit", no_rank="a bias has no rank", no_peft='no method of its own: bias="all" stands beside another one'),
        Case(
            "miss",
            first={"rank": 4},
            second={"rank": 2},
            room=4,
            peft=_miss,
            dropout=("input_dropout", "miss_dropout"),
        ),
        Case(
            "vblora",
            first={"rank": 4, "num_vectors": 8, "vector_length": 4},
            second={"rank": 2},
            peft=_vblora,
            dropout=("input_dropout", "vblora_dropout"),
        ),
    )
}


def case_of(name: str) -> Case:
    """The adapters of a method; of one that isn't in the table yet, its defaults."""
    return CASES.get(name) or Case(name, no_rank="not in the table of the matrix", no_peft="not in the table of the matrix")


class NoSuchFeatureError(Exception):
    """The library, or the method, has nothing to do this with."""


@dataclass
class Cell:
    """What one library does with one method and one feature.

    Args:
        output_error: Largest difference from a freshly built eager model, over the largest element.
        gradient_error: The same for the gradients of the adapter.
        graphs: Captured in this cell.
        breaks: Graph breaks.
        recompiles: Compilations beyond the first of each graph.
        allowed: How many of these are part of the work: a new dtype, for one.
        note: What else there is to say.
        error: What it raised, first line.
        missing: Why there is nothing to measure.
    """

    output_error: float | None = None
    gradient_error: float | None = None
    graphs: int | None = None
    breaks: int | None = None
    recompiles: int | None = None
    allowed: int = 0
    output_tolerance: float = OUTPUT_TOLERANCE
    gradient_tolerance: float = GRADIENT_TOLERANCE
    note: str = ""
    error: str = ""
    missing: str = ""

    def see(self, output_error: float | None, gradient_error: float | None = None) -> None:
        """Keep the larger error; NaN is the largest."""
        for name, value in (("output_error", output_error), ("gradient_error", gradient_error)):
            if value is not None:
                value = float("inf") if value != value else value
                setattr(self, name, max(value, getattr(self, name) or 0.0))

    @property
    def verdict(self) -> str:
        """``pass``; ``recompiles``: right, but not on one graph; ``fail``; ``none``: nothing to measure."""
        if self.missing:
            return "none"
        wrong = (self.output_error or 0) > self.output_tolerance or (self.gradient_error or 0) > self.gradient_tolerance
        if self.error or wrong:
            return "fail"
        return "recompiles" if (self.recompiles or 0) > self.allowed or self.breaks else "pass"

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        kept = {key: value for key, value in asdict(self).items() if value not in (None, "") and not key.endswith("tolerance")}
        return {"verdict": self.verdict, **kept}


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = ". ".join(lines[: 2 if type(error).__name__ == "Unsupported" else 1])  # dynamo says what it means in the second
    return f"{type(error).__name__}: {text}"[:200]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest element."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of several tensors over the largest element of all."""
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(found)[:3]}..., expected of {sorted(expected)[:3]}...")
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[key].double() - expected[key].double()).abs().max()) for key in expected) / max(largest, 1e-30)


def counted(cell: Cell, watch: Watch, *, warm: bool) -> None:
    """Write down what was compiled; on a warm model every compilation is a recompile."""
    cell.graphs = watch.graphs
    cell.breaks = sum(watch.breaks.values())
    cell.recompiles = len(watch.compilations if warm else watch.recompiles)


def defined(
    base: nn.Module, adapters: list[tuple[float, dict[str, Method], dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]]
) -> Model:
    """The plain model with W + sum_i w_i (adapt_i(W) - W), in float64, from the definition of each method.

    Args:
        base: The plain model.
        adapters: Of each: weight, path -> method, path -> tensors, path -> settings.
    """
    model = copy.deepcopy(base).double()
    with torch.no_grad():
        for path, module in model.named_modules():
            layer = describe_any(module)
            if layer is None:
                continue
            own = {key: value.clone() for key, value in layer.base_tensors(module).items()}
            total = {key: value.clone() for key, value in own.items()}
            for weight, methods, tensors, settings in adapters:
                if path in methods:
                    p = {key: value.detach().double() for key, value in {**tensors.get("", {}), **tensors[path]}.items()}
                    p |= {key: torch.tensor(value, dtype=torch.float64) for key, value in settings[path].items()}
                    for key, value in methods[path].adapt_tensors(own, p, layer).items():
                        total[key] += weight * (value - own[key])
            for key, value in layer.base_tensors(module).items():
                value.copy_(total[key])
    return model  # type: ignore[return-value]


DENSE = Dense()
FIRST_BLOCK = "the first block's input needs no gradient: one graph, the other blocks another"
