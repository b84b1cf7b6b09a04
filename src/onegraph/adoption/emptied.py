"""What a wrapper of PEFT's has in the place of the model, and of the configurations, that were taken out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from onegraph.adoption.refusals import AdoptedError


class Emptied(nn.Module):
    """Anything asked of it is an error that says where the model is: without it, PEFT's switches would do nothing, silently."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            AdoptedError: ``adopted``.
        """
        raise refusal("called")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise refusal(f"asked for {name!r}") from None


class NoConfigs(Mapping[str, Any]):
    """Configurations that are nowhere: whoever looks for one is told, so that nothing empty is saved."""

    def __getitem__(self, name: str) -> NoReturn:
        raise refusal(f"asked for its adapter {name!r}")

    def __iter__(self) -> NoReturn:
        raise refusal("asked for its adapters")

    def __len__(self) -> NoReturn:
        raise refusal("asked for its adapters")


def refusal(use: str) -> AdoptedError:
    """The error for a use of an emptied wrapper."""
    return AdoptedError(
        f"a wrapper of PEFT's was {use} after the adapters in it were adopted",
        why="The model was taken out of it: what it switches isn't there any longer.",
        hint="use what adopt() returned: adapters.model is the model, adapters.use(name) and adapters.disabled() switch",
    )
