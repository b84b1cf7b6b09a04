"""The methods of PEFT, one file each: what its configuration holds, what its tensors are called, and what they are here."""

from __future__ import annotations

from onegraph.checkpoint.dialects.peft_methods import lora
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm

FORMS: dict[str, PeftForm] = {module.FORM.peft_type: module.FORM for module in (lora,)}
"""What ``peft_type`` says -> how it is read and written."""
