"""``LoraModel`` and the others: one class for each method, with what is special to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onegraph.adapters import Adapters
from onegraph.adapters.freezing import registered
from onegraph.methods import RankAllocator, orthogonality, rank_masks
from onegraph.peft.tuner import BaseTuner
from onegraph.peft.weighted import combine_as_peft


class LoraModel(BaseTuner):
    """LoRA and DoRA."""

    prefix = "lora_"

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        **kwargs: Any,
    ) -> None:
        """Add an adapter that combines others: see ``onegraph.peft.weighted.combine_as_peft``, which says what differs from PEFT."""
        if adapter_name in self.peft_config:
            return
        config = combine_as_peft(
            self.adapters,
            {name: self.peft_config[name] for name in adapters if name in self.peft_config},
            adapters,
            weights,
            adapter_name,
            combination_type,
            rank=svd_rank,
            density=density,
            majority_sign=majority_sign_method,
            further=kwargs,
        )
        self.register(adapter_name, config)


class AdaLoraModel(LoraModel):
    """AdaLoRA: its loss keeps the factors orthogonal, and ``update_and_allocate`` takes triplets away."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes; where that has a loss, the regulariser is in it."""
        outputs = self.model(*args, **kwargs)
        config = self.peft_config.get(self._active) if isinstance(self._active, str) else None
        loss = getattr(outputs, "loss", None)
        if config is not None and isinstance(loss, Tensor) and self._trained and not self._disabled and self._triplets:
            outputs.loss = loss + config.orth_reg_weight * orthogonality(self._triplets, masks=self._masks)
        return outputs

    def _settle(self) -> None:
        super()._settle()
        # Looked up once, outside of what is compiled.
        name = self._active if isinstance(self._active, str) else None
        self._triplets = {} if name is None else _triplets(self.adapters, name)
        self._masks = rank_masks(self._triplets, _ranks(self.adapters, name)) if self._triplets and name is not None else {}

    def update_and_allocate(self, global_step: int) -> None:
        """Take in the gradients and allocate the ranks, after the optimizer's step and before gradients are cleared; steps from 0 on."""
        config = self.peft_config[str(self._active)]
        allocator = self._rank_allocator()
        allocator.state_dict()["number"].fill_(global_step)
        allocator.step()
        if global_step >= config.total_step - config.tfinal:
            config.rank_pattern = {f"{path}.lora_E": kept for path, kept in allocator.rank_pattern().items()}

    def allocation_state(self) -> dict[str, Tensor] | None:
        """What ``update_and_allocate`` goes on from; None before its first call. PEFT's checkpoints lose it."""
        owner, allocator = vars(self).get("_allocator", (None, None))
        return allocator.state_dict() if allocator is not None and owner == self._active else None

    def load_allocation_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self._rank_allocator().load_state_dict(state)

    def _rank_allocator(self) -> RankAllocator:
        """That of the active adapter, made when it is first asked for."""
        name = str(self._active)
        config = self.peft_config[name]
        owner, allocator = vars(self).get("_allocator", (None, None))
        if allocator is None or owner != name:
            allocator = RankAllocator(
                self._triplets,
                target_rank=config.target_r,
                total_steps=config.total_step,
                warm_up_steps=config.tinit,
                final_steps=config.tfinal,
                interval=config.deltaT,
                beta1=config.beta1,
                beta2=config.beta2,
                ranks=_ranks(self.adapters, name),
            )
            vars(self)["_allocator"] = name, allocator
        assert isinstance(allocator, RankAllocator)
        return allocator


def _triplets(adapters: Adapters, name: str) -> dict[str, dict[str, Tensor]]:
    needed = {"down", "up", "singular"}
    return {path: dict(own) for path, own in registered(adapters, name).items() if needed <= own.keys()}


def _ranks(adapters: Adapters, name: str) -> dict[str, int]:
    return {path: len(own["singular"]) for path, own in adapters.tensors(name).items() if "singular" in own}


class IA3Model(BaseTuner):
    """IA3."""

    prefix = "ia3_"


class LNTuningModel(BaseTuner):
    """Norms trained whole."""

    prefix = "ln_tuning_"


class LoHaModel(BaseTuner):
    """LoHa."""

    prefix = "hada_"


class LoKrModel(BaseTuner):
    """LoKr."""

    prefix = "lokr_"


class VeraModel(BaseTuner):
    """VeRA."""

    prefix = "vera_lambda_"


class VBLoRAModel(BaseTuner):
    """VB-LoRA."""

    prefix = "vblora_"


class OFTModel(BaseTuner):
    """OFT."""

    prefix = "oft_"


class BOFTModel(BaseTuner):
    """BOFT."""

    prefix = "boft_"


class HRAModel(BaseTuner):
    """HRA."""

    prefix = "hra_"


class MissModel(BaseTuner):
    """MiSS."""

    prefix = "miss_"


TUNERS: dict[str, type[BaseTuner]] = {
    "LORA": LoraModel,
    "ADALORA": AdaLoraModel,
    "IA3": IA3Model,
    "LN_TUNING": LNTuningModel,
    "LOHA": LoHaModel,
    "LOKR": LoKrModel,
    "VERA": VeraModel,
    "VBLORA": VBLoRAModel,
    "OFT": OFTModel,
    "BOFT": BOFTModel,
    "HRA": HRAModel,
    "MISS": MissModel,
}
"""``peft_type`` -> the class for it."""
