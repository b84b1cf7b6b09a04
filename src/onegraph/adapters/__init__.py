"""All model surgery: choosing layers, adapting them, switching between adapters."""

from __future__ import annotations

from onegraph.adapters.adapted import Adapted
from onegraph.adapters.attach import adapters_of, attach
from onegraph.adapters.collection import Adapters
from onegraph.adapters.files import register_file_functions
from onegraph.adapters.plan import Plan, PlanEntry
from onegraph.adapters.select import Targets, select
from onegraph.adapters.slots import Slots

__all__ = [
    "Adapted",
    "Adapters",
    "Plan",
    "PlanEntry",
    "Slots",
    "Targets",
    "adapters_of",
    "attach",
    "register_file_functions",
    "select",
]
