"""``adopt``: PEFT's layers out, ours in, and nothing computes anything else than before."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, overload, runtime_checkable

from torch import nn

from onegraph.adapters import Adapters, adapters_of
from onegraph.adapters.replacing import Replacement
from onegraph.adoption.emptied import Emptied, NoConfigs
from onegraph.adoption.placing import dtype_of, placement_of, put, set_trained
from onegraph.adoption.reading import Taken, adapters_on, taken
from onegraph.adoption.recognition import NOTES, Held, recognised
from onegraph.adoption.refusals import few, undecided, unsupported
from onegraph.adoption.sites import Site, sites_of
from onegraph.adoption.state import State, check_sums, state_of
from onegraph.adoption.unwrapping import check_plain, unmerge, unwrap
from onegraph.checkpoint.origin import started_by
from onegraph.errors import AdapterError

logger = logging.getLogger("onegraph")


@runtime_checkable
class Pipeline(Protocol):
    """What a diffusers pipeline is made of, by name."""

    @property
    def components(self) -> Mapping[str, Any]:
        """Models, schedulers, tokenizers."""
        ...


@overload
def adopt(x: nn.Module, *, trainable: bool | None = None) -> Adapters: ...
@overload
def adopt(x: Pipeline, *, trainable: bool | None = None) -> dict[str, Adapters]: ...
def adopt(x: nn.Module | Pipeline, *, trainable: bool | None = None) -> Adapters | dict[str, Adapters]:
    """Take over a model that PEFT, transformers or diffusers adapted: in place, with the same outputs, on an error unchanged.

    The adapters keep their names, values and strengths. What ran before runs afterwards: one adapter, none, or what was merged (a merge can
    be undone with ``unmerge``). Where PEFT ran several at once there is one adapter more, their sum, named after them ("ink+paper").

    The model is ``adapters.model``, the same object without PEFT's layers. A ``PeftModel`` that was around it is empty afterwards, and says
    so when it is used. Parameters are new ones: make an optimizer anew.

    Args:
        x: A ``PeftModel``, a model after ``add_adapter`` or ``inject_adapter_in_model``, or a diffusers pipeline. One that onegraph has
            adapted already is left as it is.
        trainable: Whether the adapters train; None: as before.

    Returns:
        The adapters; for a pipeline those of each component that has some: ``{"unet": ..., "text_encoder": ...}``.

    Raises:
        ConfigurationError: ``not-a-model``.
        AdapterError: ``adopt-nothing`` for a model that isn't adapted, ``adopt-both`` for one with our layers and PEFT's;
            ``adopt-unsupported`` for a method, an option or a kind of layer that isn't here; ``adopt-state`` where PEFT's layers
            don't agree on what runs, or compute no sum; ``adopted`` for an empty PeftModel.
    """
    if isinstance(x, nn.Module) or not isinstance(x, Pipeline):
        with ExitStack() as undo:
            done = _adopted(x, trainable, undo)
            undo.pop_all()
        return done.finished()
    modules = {name: module for name, module in x.components.items() if isinstance(module, nn.Module)}
    all_done: dict[str, _Done] = {}
    with ExitStack() as undo:
        for name, module in modules.items():
            try:
                all_done[name] = _adopted(module, trainable, undo)
            except AdapterError as error:
                if error.code != "adopt-nothing":
                    raise type(error)(f"{name}: {error.what}", why=error.why, hint=error.hint, code=error.code) from error
        if not all_done:
            raise AdapterError(
                f"{type(x).__name__} isn't adapted: {few(sorted(modules))} have no layer of PEFT's",
                hint="pipeline.load_lora_weights(path) adapts it; onegraph.load_parts(models, path) loads a file without PEFT",
                code="adopt-nothing",
            )
        undo.pop_all()
    return {name: done.finished() for name, done in all_done.items()}


@dataclass(frozen=True)
class _Done:
    """A model with our adapters; of PEFT there are only notes left.

    Args:
        adapters: On it.
        held: What it was; None for one that was ours already.
    """

    adapters: Adapters
    held: Held | None

    def finished(self) -> Adapters:
        """Take away what would still look like PEFT's; nothing here can fail."""
        if self.held is not None:
            for note in NOTES:
                vars(self.held.model).pop(note, None)
            if self.held.holder is not None:
                Replacement().hang(self.held.holder, "model", Emptied())
                setattr(self.held.holder, NOTES[0], NoConfigs())
            self._say_what_now_acts(self.held.model)
            self._say_what_to_keep()
            logger.info("%s: adopted %s", type(self.held.model).__name__, ", ".join(map(repr, self.adapters.names)))
        return self.adapters

    def _say_what_to_keep(self) -> None:
        """A start such as PiSSA took a part out of the base weights: the adapter means nothing beside the original ones."""
        started = {name: start for name in self.adapters.names if (start := started_by(self.adapters, name)) is not None}
        if started:
            logger.warning(
                "%s: the start changed the base weights of this model, and the adapter belongs to those. Keep them (the model after"
                " detach()), and save the adapter with format='native' to load it beside them. A folder of format='peft' is for the"
                " original base weights: PEFT does the start again there.",
                ", ".join(f"{name!r} ({start})" for name, start in started.items()),
            )

    def _say_what_now_acts(self, model: nn.Module) -> None:
        """Beside PEFT's layers, the fused kernel of an encoder layer reads the base weights; beside ours it is switched off."""
        fused = [name for name, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
        passed = [name for name in fused if any(path.startswith(f"{name}.") for path in self.adapters.layers)]
        if passed:
            logger.warning(
                "adapters in nn.TransformerEncoderLayer (%s) act in inference now; PEFT's were passed by there, and acted only in training",
                few(passed),
            )


def _adopted(x: object, trainable: bool | None, undo: ExitStack) -> _Done:
    """Adopt one model.

    Args:
        x: It.
        trainable: As for ``adopt``.
        undo: Gets what makes it what it was.
    """
    held = recognised(x)
    if isinstance(held, Adapters):
        return _Done(held, None)
    sites = sites_of(held.model)
    _check_names(held, sites)
    state = state_of(sites)
    if state.merged:
        unmerge(held.model, sites, undo)
        sites = sites_of(held.model)  # PEFT merges a norm by exchanging it with its copy
    adapters_taken = [taken(name, config, sites, held.model) for name, config in held.configs.items()]
    trains = _trains(adapters_taken, held, state) if trainable is None else trainable
    _check_convolutions(adapters_taken, state)
    unwrap(sites, undo)
    check_plain(held.model)
    free = [parameter for parameter in held.model.parameters() if parameter.requires_grad]
    placements = [placement_of(each, held.model) for each in adapters_taken]
    check_sums(state, {each.name: placement.methods for each, placement in zip(adapters_taken, placements)})
    dtype = dtype_of(adapters_taken)
    undo.callback(_take_off, held.model)
    for each, placement in zip(adapters_taken, placements):
        put(each, placement, held.model, dtype)
    adapters = adapters_of(held.model)
    assert adapters is not None  # there are layers, and names on all of them
    _run(adapters, state)
    set_trained(adapters, trains, free)
    return _Done(adapters, held)


def _check_names(held: Held, sites: Sequence[Site]) -> None:
    """Every adapter of the layers has a configuration, and the other way round."""
    on_layers = set[str]().union(*(adapters_on(site) for site in sites))
    if unknown := sorted(on_layers - held.configs.keys()):
        where = next(site.path for site in sites if unknown[0] in adapters_on(site))
        raise unsupported(
            f"adapter {unknown[0]!r} is on {where} and has no configuration",
            why="Only the configuration says what a layer of PEFT's computes.",
            hint="adopt what PEFT returned for it",
        )
    if missing := sorted(held.configs.keys() - on_layers):
        raise unsupported(
            f"adapter {missing[0]!r} has a configuration and is on no layer",
            hint=f"delete it first: peft_model.delete_adapter({missing[0]!r})",
        )


def _trains(adapters: Sequence[Taken], held: Held, state: State) -> bool:
    """Whether any adapter trains; disabling freezes all of them, so that then only the configurations know."""
    if state.disabled:
        return any(not getattr(config, "inference_mode", False) for config in held.configs.values())
    return any(tensor.requires_grad for each in adapters for tensor in each.tensors)


def _check_convolutions(adapters: Sequence[Taken], state: State) -> None:
    """PEFT's OFT computes something else beside a convolution with a kernel than it merges into it."""
    running = set() if state.disabled else set(state.active) - set(state.merged)
    for each in adapters:
        for path, layer in each.layers.items():
            kernel = getattr(getattr(layer, "base_layer", None), "kernel_size", None)
            if each.name in running and hasattr(layer, "oft_R") and isinstance(kernel, tuple) and set(kernel) != {1}:
                raise undecided(
                    f"{each.name!r} is an OFT on the convolution {path} with a kernel of {'x'.join(map(str, kernel))}",
                    why="What PEFT computes there beside the layer is another function than what it merges; here it is the merged one.",
                    hint="peft_model.merge_adapter() first gives that function, which is kept",
                )


def _run(adapters: Adapters, state: State) -> None:
    """Let that run which ran."""
    if state.disabled or not state.active:
        adapters.use(None)
    elif len(state.active) == 1:
        adapters.use(state.active[0])
    else:
        name = _free_name("+".join(state.active), adapters)
        adapters.combine(name, dict.fromkeys(state.active, 1.0))
        adapters.use(name)
    if state.merged and not state.disabled:
        adapters.merge(list(state.merged), safe=False)  # whatever the numbers are, they are what is there


def _take_off(model: nn.Module) -> None:
    adapters = adapters_of(model)
    if adapters is not None and adapters.merged:
        adapters.unmerge()
    if adapters is not None:
        adapters.detach()


def _free_name(name: str, adapters: Adapters) -> str:
    while name in adapters.names:
        name += "+"
    return name
