"""What accelerate's configuration says is what is compiled, and every value's origin is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from onegraph.compiling import LaunchRecord, read_launch, resolve_settings
from onegraph.errors import CompileError, ConfigurationError

# What `accelerate launch` writes when the configuration file holds nothing but the backend.
LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}


def config_file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_nothing_said_compiles_nothing() -> None:
    settings = resolve_settings({})
    assert settings.backend == "no"
    assert not settings.active


def test_file_of_accelerate_config_is_obeyed_and_named(tmp_path: Path) -> None:
    path = config_file(tmp_path, "dynamo_config:\n  dynamo_backend: INDUCTOR\n")
    launch = read_launch(["python", "/usr/bin/accelerate", "launch", "--config_file", str(path), "-m", "onegraph.train_network"])
    settings = resolve_settings(LAUNCHED, launch=launch)
    assert settings.backend == "inductor"
    assert settings.sources["backend"] == f"file {path}"
    assert settings.regions == "blocks"


def test_false_that_nobody_chose_leaves_shapes_automatic() -> None:
    settings = resolve_settings(LAUNCHED, launch=LaunchRecord())
    assert settings.dynamic is None
    assert settings.fullgraph is True


def test_false_written_in_the_file_is_explained(tmp_path: Path) -> None:
    path = config_file(tmp_path, "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_use_dynamic: false\n")
    launch = read_launch(["accelerate", "launch", f"--config_file={path}", "-m", "onegraph.train_network"])
    settings = resolve_settings(LAUNCHED, launch=launch)
    assert settings.dynamic is None
    assert any("dynamo_use_dynamic" in note for note in settings.notes)


def test_true_is_obeyed_and_our_flag_can_say_no() -> None:
    environment = {**LAUNCHED, "ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}
    assert resolve_settings(environment, launch=LaunchRecord()).dynamic is True
    refused = resolve_settings(environment, flags={"dynamic": False}, launch=LaunchRecord())
    assert refused.dynamic is False
    assert refused.sources["dynamic"] == "flag --dynamo_use_dynamic"


def test_launch_flag_is_told_from_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, "dynamo_config:\n  dynamo_backend: EAGER\n")
    launch = read_launch(["accelerate", "launch", "--config_file", str(path), "--dynamo_backend=inductor", "-m", "onegraph.train_network"])
    assert "flag of accelerate launch" in resolve_settings(LAUNCHED, launch=launch).sources["backend"]


@pytest.mark.parametrize("module", ["-m", "--module"])
@pytest.mark.parametrize("launcher", [["accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"]])
def test_flags_behind_the_module_are_ours_not_launchs(tmp_path: Path, launcher: list[str], module: str) -> None:
    path = config_file(tmp_path, "dynamo_config: {dynamo_backend: INDUCTOR}\n")
    ours = ["onegraph.train_network", "--dynamo_backend=eager", "--config_file=run.toml"]
    launch = read_launch([*launcher, "--config_file", str(path), module, *ours])
    assert resolve_settings(LAUNCHED, launch=launch).sources["backend"] == f"file {path}"


def test_environment_alone_is_named() -> None:
    settings = resolve_settings(LAUNCHED, launch=LaunchRecord())
    assert settings.sources["backend"] == "environment ACCELERATE_DYNAMO_BACKEND"


def test_our_flag_wins_over_the_environment() -> None:
    settings = resolve_settings(LAUNCHED, flags={"backend": "aot_eager", "regions": "whole", "mode": None}, launch=LaunchRecord())
    assert (settings.backend, settings.regions) == ("aot_eager", "whole")
    assert settings.sources["backend"] == "flag --dynamo_backend"


def test_parent_that_is_no_launch_is_no_record() -> None:
    assert read_launch(["bash", "-c", "python -m onegraph.train_network --config_file run.toml"]) == LaunchRecord()


@pytest.mark.parametrize("content", ["", "[1, 2", "dynamo_config: 3", "\x00"])
def test_unreadable_file_is_no_origin(tmp_path: Path, content: str) -> None:
    path = config_file(tmp_path, content)
    launch = read_launch(["accelerate", "launch", "--config_file", str(path)])
    assert resolve_settings(LAUNCHED, launch=launch).sources["backend"].startswith("environment")


def test_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_settings({**LAUNCHED, "ACCELERATE_DYNAMO_MODE": "max-autotun"}, launch=LaunchRecord())
    assert "max-autotune" in caught.value.hint


def test_mode_is_not_passed_to_a_backend_without_modes() -> None:
    environment = {**LAUNCHED, "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_MODE": "max-autotune"}
    settings = resolve_settings(environment, launch=LaunchRecord())
    assert settings.mode == "default"
    assert any("max-autotune" in note for note in settings.notes)


def test_bad_boolean_names_the_variable() -> None:
    with pytest.raises(ConfigurationError, match="ACCELERATE_DYNAMO_USE_DYNAMIC=maybe"):
        resolve_settings({**LAUNCHED, "ACCELERATE_DYNAMO_USE_DYNAMIC": "maybe"}, launch=LaunchRecord())


def test_gone_backend_names_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, "dynamo_config: {dynamo_backend: OFI}\n")
    launch = read_launch(["accelerate", "launch", "--config_file", str(path)])
    with pytest.raises(CompileError, match=str(path)):
        resolve_settings({**LAUNCHED, "ACCELERATE_DYNAMO_BACKEND": "OFI"}, launch=launch)
