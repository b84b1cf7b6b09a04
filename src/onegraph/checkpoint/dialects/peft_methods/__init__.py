"""The methods of PEFT, one file each: what its configuration holds, what its tensors are called, and what they are here."""

from __future__ import annotations

from onegraph.checkpoint.dialects.peft_methods import adalora, boft, hra, ia3, ln_tuning, loha, lokr, lora, miss, oft, vblora, vera
from onegraph.checkpoint.dialects.peft_methods.form import PeftForm

_FILES = (adalora, boft, hra, ia3, ln_tuning, loha, lokr, lora, miss, oft, vblora, vera)

FORMS: dict[str, PeftForm] = {file.FORM.peft_type: file.FORM for file in _FILES}
"""What ``peft_type`` says -> how it is read and written."""
