"""What a loaded PEFT configuration said beyond the adapter itself, kept so that saving writes it again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from onegraph.adapters import Adapters
from onegraph.adapters.freezing import registered
from onegraph.checkpoint.dialects.peft_config import kept_fields
from onegraph.checkpoint.dialects.peft_methods.lora import changed_base

# Adapters -> name -> one of its Parameters, which tells whether it is still the adapter that was loaded, and the fields.
_FIELDS: weakref.WeakKeyDictionary[Adapters, dict[str, tuple[weakref.ref[nn.Parameter], dict[str, object]]]] = weakref.WeakKeyDictionary()


def remember(adapters: Adapters, name: str, config: Mapping[str, object]) -> None:
    """Keep the fields that say what the adapter was made for and how, and those that nobody here knows."""
    _FIELDS.setdefault(adapters, {})[name] = (weakref.ref(_a_parameter(adapters, name)), kept_fields(config))


def remembered(adapters: Adapters, name: str) -> dict[str, object]:
    """The fields kept for an adapter; ``{}`` for one that was not loaded, or was deleted and made anew under the same name."""
    parameter, fields = _FIELDS.get(adapters, {}).get(name, (None, {}))
    return dict(fields) if parameter is not None and parameter() is _a_parameter(adapters, name) else {}


def started_by(adapters: Adapters, name: str) -> str | None:
    """The start of PEFT's that changed the base weights this adapter stands beside; None where none did."""
    return changed_base(remembered(adapters, name))


def _a_parameter(adapters: Adapters, name: str) -> nn.Parameter:
    return next(parameter for parameters in registered(adapters, name).values() for parameter in parameters.values())
