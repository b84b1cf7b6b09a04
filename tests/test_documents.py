"""The documents stay true: links, commands, names, flags, tables, and the program in the README runs."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import onegraph
from onegraph.compiling import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=label)
def test_links_and_commands_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    scripts = re.findall(r"bash (scripts/\w+)", text)
    missing = [link for link in links if not (document.parent / link).exists()] + [name for name in scripts if not (ROOT / name).is_file()]
    assert missing == []


def python_blocks() -> Iterator[str]:
    for document in DOCUMENTS:
        if document.name == "architecture.md":
            continue  # signatures, not programs
        yield from re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def test_documented_names_exist() -> None:
    from onegraph.adapters import Adapters

    blocks = list(python_blocks())
    used = {
        (node.value.id, node.attr)
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    public = {name for owner, name in used if owner == "og"}
    methods = {name for owner, name in used if owner == "adapters"}
    assert {"attach", "LoRA", "compile", "load", "check"} <= public
    assert [name for name in public if not hasattr(onegraph, name)] == []
    # "plan", "names" and the like are set in __init__
    known = {*dir(Adapters), *getattr(Adapters, "__annotations__", {}), *re.findall(r"self\.(\w+)", source_of(Adapters))}
    assert [name for name in methods if name not in known] == []


def source_of(kind: type) -> str:
    module = importlib.import_module(kind.__module__)
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", ["README.md", "docs/compile.md"])
def test_every_backend_is_in_the_table(document: str) -> None:
    table = (ROOT / document).read_text(encoding="utf-8").partition("## Backends")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    hardware = {"hpu_backend", "neuron"}  # named in the error text only: each needs its own machine
    aliases = {"torch_tensorrt"} if document == "README.md" else set()
    assert sorted(set(BACKENDS) - named - hardware - aliases) == []


def test_the_list_of_flags_is_current() -> None:
    spec = importlib.util.spec_from_file_location("write_flags", ROOT / "scripts" / "write_flags.py")
    assert spec is not None
    assert spec.loader is not None
    write_flags = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_flags)
    page = write_flags.PAGE.read_text(encoding="utf-8")
    assert page == write_flags.page(), "the flags have changed: .venv/bin/python scripts/write_flags.py"
    assert page.count("| `--") > 100


FLAG_IN_TEXT = re.compile(r"(?<![\w-])--([a-z]\w+)")
LAUNCH_FLAGS = {"config_file"}  # accelerate's, before -m


@pytest.mark.parametrize("document", ["README.md", "docs/training-diffusion.md", "docs/compile.md", "demo/run_demo.py"])
def test_a_mentioned_flag_is_one_that_the_command_takes(document: str) -> None:
    from onegraph.cli.sd_table import FLAGS

    text = (ROOT / document).read_text(encoding="utf-8").partition("### Known and not supported")[0]
    text = "\n".join(line for line in text.splitlines() if not line.startswith("onegraph "))  # other commands have flags of their own
    options_of_others = {"dev", "fix", "readme", "output", "logdir", "flag"}
    mentioned = set(FLAG_IN_TEXT.findall(text)) - options_of_others
    assert {"mixed_precision"} <= mentioned or document == "docs/compile.md"
    assert sorted(name for name in mentioned - LAUNCH_FLAGS if name not in FLAGS or FLAGS[name].refusal) == []


@pytest.mark.slow
def test_the_program_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import UNet2DConditionModel

    # the real thing but for the compiler's back end, which would take minutes
    monkeypatch.setattr(onegraph, "compile", functools.partial(onegraph.compile, backend="eager"))
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "og.compile(model)" in program
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 2, "layers_per_block": 1}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    names = {"torch": torch, "model": UNet2DConditionModel(**sizes, **blocks), "other_model": UNet2DConditionModel(**sizes, **blocks)}
    names["batch"] = {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([7]), "encoder_hidden_states": torch.randn(1, 3, 8)}
    exec(program, names)
    assert names["report"].right, str(names["report"])
    assert names["adapters"].names == ["sketch"]
    assert (tmp_path / "sketch.safetensors").is_file()


def test_every_method_is_documented(root: Path) -> None:
    from onegraph.methods import METHODS

    text = (root / "docs" / "methods.md").read_text(encoding="utf-8")
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert named == {method.__name__ for method in METHODS.values()}
    assert [name for name in named if getattr(onegraph, name, None) is None or name not in onegraph.__all__] == []
