"""The house itself: rules that no tool checks, and documents that must stay true."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import onegraph

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "onegraph"
MODULES = sorted(SOURCE.rglob("*.py"))
SCRIPTS = [ROOT / "scripts" / name for name in ("setup", "check", "test", "demo")] + [ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Rules about the source


def compiler_uses(source: str) -> list[str]:
    """Every mention of torch.compile, torch.compiler, dynamo or inductor in code, as "line: name"."""
    found = []
    nodes = list(ast.walk(ast.parse(source)))
    # Asking whether a graph is being traced is no use of the compiler.
    asked = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compiler.is_compiling"]
    allowed = {id(part) for node in asked for part in (node, node.value)}
    for node in nodes:
        names: list[str] = []
        if id(node) in allowed:
            continue
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
