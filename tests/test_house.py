"""The house itself: rules that no tool checks, and documents that must stay true."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import onegraph
from onegraph.compiling import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "onegraph"
MODULES = sorted(SOURCE.rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [ROOT / "scripts" / name for name in ("setup", "check", "test", "demo")] + [ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Rules about the source


def compiler_uses(source: str) -> list[str]:
    """Every mention of torch.compile, torch.compiler, dynamo or inductor in code, as "line: name"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [f"{node.lineno}: {name}" for name in names if re.match(r"torch\.(compile|compiler|_dynamo|_inductor)\b", name)]
    return found


@pytest.mark.parametrize("path", [path for path in MODULES if "compiling" not in path.parts], ids=label)
def test_only_compiling_touches_the_compiler(path: Path) -> None:
    assert compiler_uses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.compile(model)", "import torch._dynamo", "from torch import compiler", "from torch._inductor import config"],
)
def test_a_use_of_the_compiler_is_found(source: str) -> None:
    assert compiler_uses(source)


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").glob("*.py")), ids=label)
def test_a_method_file_holds_no_module(path: Path) -> None:
    bases = [ast.unparse(base) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef) for base in node.bases]
    assert not [base for base in bases if base.endswith("Module")]


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_a_file_has_one_subject(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, "over 400 lines: two subjects share a file"
    assert not {"utils", "helpers", "common", "misc"} & set(path.with_suffix("").parts[len(SOURCE.parts) :])


def text_files() -> list[Path]:
    folders = (ROOT / name for name in ("src", "tests", "docs", "scripts", "demo", "benchmarks", ".ci"))
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*") if "__pycache__" not in path.parts]
    files += [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"}]
    return [path for path in sorted(files) if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".json", ""} and path.is_file()]


MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|mnt|scratch|work|shared|opt)/\w")
UNFINISHED = re.compile(r"\b(?:" + "TO" + "DO|FIX" + "ME|X" + r"XX)\b")


def test_nothing_is_tied_to_one_machine_or_unfinished() -> None:
    found = [
        f"{label(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line) or UNFINISHED.search(line)
    ]
    assert found == []


def test_paths_of_one_machine_are_found() -> None:
    assert MACHINE_PATH.search("see /" + "home/somebody/model.ckpt")
    assert not MACHINE_PATH.search("docs/work/notes and https://example.org/home/page")


# The package and its installation


def test_there_is_one_version() -> None:
    version = PROJECT["project"]["version"]
    assert onegraph.__version__ == version
    assert importlib.metadata.version("onegraph") == version
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text() or f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): Version(version) for name, version in entries}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    extras = [entry for extra in PROJECT["project"]["optional-dependencies"].values() for entry in extra]
    found = [Requirement(entry) for entry in [*PROJECT["project"]["dependencies"], *extras]]
    return [requirement for requirement in found if requirement.name != "onegraph"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_requirement_is_a_range_with_a_pin_in_it(requirement: Requirement) -> None:
    pin = pins()[normal(requirement.name)]
    assert requirement.specifier.contains(pin)
    assert "==" not in str(requirement.specifier)
    assert pin.local is None, "a local version part fits one machine's wheel only"


def imported_packages() -> dict[str, str]:
    """Top-level package -> the first file of ours that imports it."""
    found: dict[str, str] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                found.setdefault(name.partition(".")[0], label(path))
    return found


def test_every_import_is_a_declared_dependency() -> None:
    import sys

    declared = {normal(requirement.name) for requirement in requirements()}
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        name: path
        for name, path in imported_packages().items()
        if name not in sys.stdlib_module_names | {"onegraph", ""}
        and not declared & {normal(provider) for provider in providers.get(name, [])}
    }
    assert undeclared == {}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(onegraph.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=label)
def test_a_script_is_bash_that_parses(script: Path) -> None:
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_demo_configuration_is_one_that_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "demo" / "accelerate.yaml"))
    assert config.dynamo_config == {"dynamo_backend": "INDUCTOR"}
    assert config.use_cpu


# The documents


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
    options_of_others = {"dev", "fix", "readme", "output", "logdir", "flag"}
    mentioned = set(FLAG_IN_TEXT.findall(text)) - options_of_others
    assert {"mixed_precision"} <= mentioned or document == "docs/compile.md"
    assert sorted(name for name in mentioned - LAUNCH_FLAGS if name not in FLAGS or FLAGS[name].refusal) == []
