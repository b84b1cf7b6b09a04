"""``print(adapters)``: how every adapter stands."""

from __future__ import annotations

import torch
from torch import nn

from onegraph import DoRA, LoRA, VBLoRA, attach
from onegraph.adapters import Adapters


def lines(adapters: Adapters) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in (line.split() for line in str(adapters).splitlines())}


def test_the_table_is_what_is_there() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    adapters = attach(model, LoRA(rank=4, alpha=2), targets=["0", "1"], overrides={"1": LoRA(rank=2)}, name="first", capacity=6)
    adapters.add("second", DoRA(rank=1), targets=["0"])
    adapters.add("bank", VBLoRA(rank=2, num_vectors=3, vector_length=4))
    table = lines(adapters)
    assert table["first"] == ["active", "lora", "2", "to", "4", "2", f"{16 * 4 + 12 * 2}", "1"]
    assert table["second"] == ["dora", "1", "1", f"{16 + 8}", "1"]
    assert table["bank"] == ["vblora", "2", "2", f"{2 * 3 * (2 + 2) + 2 * 3 * (2 + 1) + 12}", "1"]
    for name in adapters.names:
        count = sum(tensor.numel() for layer in adapters.tensors(name).values() for tensor in layer.values())
        assert f"{count}" in table[name]

    assert repr({"unet": adapters}) == "{'unet': <Adapters of Sequential, 2 layers: first (active), second, bank>}"

    adapters.scale("second", 0.25)
    assert lines(adapters)["second"][-1] == "0.25"
    with adapters.rows(["second", None]):
        assert [name for name, cells in lines(adapters).items() if cells[1] == "rows"] == ["second"]
        assert "active" not in str(adapters)
    adapters.merge("second")
    assert lines(adapters)["second"][0] == "merged"
    adapters.unmerge()
    adapters.use(None)
    assert "active" not in str(adapters)
    adapters.detach()
    assert str(adapters) == "no adapter: the base model"
    assert torch.is_tensor(model(torch.randn(2, 8)))
