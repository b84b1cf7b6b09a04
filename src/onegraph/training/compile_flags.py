"""What a run's own settings say about compiling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from onegraph.training.settings import setting


@dataclass(frozen=True, kw_only=True)
class CompileFlags:
    """What the flags say about compiling; None leaves it to accelerate's settings."""

    check: str = setting(
        "start",
        "compare compiled with eager loss and gradients: never, on the first batch, or also on every new shape and at every save",
        choices=("off", "start", "strict"),
    )
    regions: str | None = setting(None, "compile repeated blocks or the whole model", choices=("blocks", "whole"))
    backend: str | None = setting(None, "torch.compile backend; no: run eager")
    mode: str | None = setting(
        None, "torch.compile mode", choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    )
    dynamic: bool | None = setting(None, "one graph for all shapes (True), one a shape (False), or as torch decides")
    fullgraph: bool | None = setting(None, "a graph break is an error")

    def flags(self) -> dict[str, object]:
        """What was said, for ``resolve_settings(environment, flags=...)``: names of CompileSettings' fields."""
        said = {name: getattr(self, name) for name in ("backend", "mode", "dynamic", "fullgraph", "regions")}
        return {name: value for name, value in said.items() if value is not None}
