"""The whole check: planted faults are caught and the module named, healthy models stay silent, everything is put back."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import onegraph as og
import planted
from onegraph.checking import Report
from onegraph.checking.batches import batch_for
from onegraph.checking.breaks import instead
from onegraph.checking.targets import from_folder, from_function
from onegraph.cli.main import main
from onegraph.errors import ConfigurationError, MismatchError, ModelFileError
from planted import ROWS, Breaks, Net, TiedWithDropout

AGAIN = "the first batch again"
IN_PLACE = "weights changed in place"


def checked(backend: str, situations: list[str] | bool = False, *, dtype: torch.dtype = torch.float32, **options: object) -> Report:
    net, x = planted.build()
    net.to(dtype)
    return og.check(net, x.to(dtype), backend=f"planted:{backend}", thorough=situations, **{"steps": 0, "bisect": True, **options})


# backend, the situations asked for, the first situation that is wrong, the smallest module that is
FAULTS = {
    "one gradient is zero": ("zeroes_one_gradient", False, "the batch itself", "block.linear"),
    "two rows are swapped": ("swaps_two_rows", False, "the batch itself", "block.norm"),
    "a scale is dropped": ("drops_a_scale", False, "the batch itself", "block.halve"),
    "one shape is wrong": ("wrong_at_another_shape", ["one row more"], "one row more", "block.halve"),
    "weights are stale": ("stale_weights", [IN_PLACE], IN_PLACE, "block.linear"),
    "an input's gradient is zero": ("zeroes_input_gradients", ["gradients of the inputs"], "gradients of the inputs", "block.halve"),
}


@pytest.mark.parametrize(("backend", "situations", "where", "path"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught_and_its_module_named(backend: str, situations: list[str] | bool, where: str, path: str) -> None:
    report = checked(backend, situations)
    assert not report.agrees
    assert report.culprit is not None
    assert report.culprit.situation == where
    assert report.culprit.path == path
    assert report.culprit.backends == {"eager": "right", "aot_eager": "right", f"planted:{backend}": "wrong"}
    assert path in str(report)
    if where != "the batch itself":  # the fault shows nowhere else
        assert report.comparison.right
    with pytest.raises(MismatchError):
        report.raise_if_wrong()


def test_the_same_backend_without_a_fault_is_right() -> None:
    report = checked("healthy", ["one row more", IN_PLACE, AGAIN])
    assert report.right, str(report)
    assert report.culprit is None
    assert [variation.outcome for variation in report.variations] == ["right"] * 3


def test_a_fault_is_found_in_bf16_and_noise_is_not_one() -> None:
    assert checked("healthy", dtype=torch.bfloat16).agrees
    report = checked("drops_a_scale", dtype=torch.bfloat16, bisect=False)
    assert not report.agrees
    assert report.culprit is None
    assert report.comparison.eager_total_error > 1e-4  # the noise is there, and shown


def test_a_tenth_too_small_is_no_noise_in_bf16() -> None:
    """Eager's error and the share that passes are larger than this fault; it has a direction, and noise has none."""

    def found(backend: str) -> Report:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
        return og.check(net, torch.randn(32, 6).bfloat16(), backend=backend)

    wrong = found("planted:drops_a_tenth").comparison.faults
    assert {"2.weight", "4.weight"} <= {row.name for row in wrong if row.scaled}
    assert all(row.error <= row.allowed for row in wrong if row.scaled)
    assert found("planted:healthy").right


def test_the_training_run_alone_finds_stale_weights() -> None:
    report = checked("stale_weights", steps=4)
    assert report.comparison.right
    assert report.training is not None
    assert not report.training.right
    assert report.training.wrong_step not in (None, 0)
    assert report.culprit is not None
    assert report.culprit.path == "block.linear"
    control = checked("healthy", steps=4)
    assert control.training is not None
    assert control.training.right, str(control.training)
    assert control.training.compiled.losses[-1] < control.training.compiled.losses[0]


def test_the_script_shows_the_fault_alone(tmp_path: Path) -> None:
    report = checked("drops_a_scale", script=tmp_path / "there")
    assert report.culprit is not None
    assert report.culprit.script == tmp_path / "there" / "reproduce.py"
    assert report.culprit.shown is True, report.culprit.note
    # the control: the same script with a right backend finds nothing
    script = report.culprit.script
    script.write_text(script.read_text().replace("from planted import drops_a_scale as", "from planted import healthy as"))
    with pytest.raises(SystemExit) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    assert caught.value.code == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_model_with_dropout_and_tied_weights_is_right_in_every_situation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TiedWithDropout().to(dtype).eval()
    ids = torch.randint(0, 11, (3, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    report = og.check(model, ids, backend="eager", thorough=True, steps=5)
    assert report.right, str(report)
    outcomes = {variation.name: variation.outcome for variation in report.variations}
    assert outcomes["with dropout"] == "right"
    assert outcomes["a shorter sequence"] == "right"
    assert set(outcomes.values()) == {"right"}, str(report)
    assert report.comparison.reference == torch.float64
    # and nothing is left of it
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert model.drop.p == 0.2
    assert model.attention_dropout == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_adapters_are_switched_disabled_and_mixed_in_rows() -> None:
    net, x = planted.build()
    adapters = og.attach(net, og.LoRA(rank=2, dropout=0.3), targets="all-linear")
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    report = og.check(net, x, backend="eager", thorough=True, steps=3)
    assert report.right, str(report)
    names = {variation.name for variation in report.variations}
    assert {"a row an adapter", "another adapter", "adapters disabled", "with dropout", "gradients of the inputs"} <= names
    rows = next(variation for variation in report.variations if variation.name == "a row an adapter").comparison
    assert rows is not None
    assert all(row.norm > 0 for row in rows.rows if "up" in row.name)
    assert adapters.names == ["default"]
    assert adapters.active == "default"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_switch_that_keeps_the_old_adapter_is_caught() -> None:
    net, x = planted.build()
    og.attach(net, og.LoRA(rank=8), targets=["block.linear"])  # its factors are (8, 8)
    report = og.check(net, x, backend="planted:stale_weights", thorough=["another adapter"], steps=0, bisect=False)
    assert report.comparison.right
    assert [variation.outcome for variation in report.variations] == ["wrong"]


def test_what_the_model_cannot_do_is_not_wrong() -> None:
    class Fixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] != ROWS:
                raise ValueError("four rows only")
            return super().forward(x)

    torch.manual_seed(0)
    report = og.check(Fixed(), torch.randn(ROWS, 6), backend="eager", thorough=["one row more"], steps=0)
    assert report.right
    assert report.variations[0].outcome == "skipped"
    assert "four rows only" in report.variations[0].skipped


def test_a_situation_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="one row more") as caught:
        checked("healthy", ["no such thing"])
    assert caught.value.code == "situation-unknown"


def test_without_memory_for_float64_the_reference_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    net, x = planted.build()
    report = og.check(net.bfloat16(), x.bfloat16(), backend="eager")
    assert report.comparison.reference == torch.bfloat16  # float32 doesn't fit either
    assert "float64 doesn't fit" in report.notes[0]
    numel = sum(parameter.numel() for parameter in net.parameters())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * numel))
    assert og.check(net, x.bfloat16(), backend="eager").comparison.reference == torch.float32


def test_random_numbers_of_the_models_own_are_no_fault() -> None:
    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    torch.manual_seed(0)
    report = og.check(Noisy(), torch.randn(ROWS, 6), backend="eager")
    assert report.right, str(report)
    assert "random numbers of its own" in report.notes[0]


def test_breaks_have_a_line_and_what_to_write_instead() -> None:
    source, start = inspect.getsourcelines(Breaks)
    lines = {text.strip(): start + number for number, text in enumerate(source)}
    net, x = planted.build_breaking()
    report = og.check(net, x, backend="eager", fullgraph=False)
    assert report.agrees
    assert not report.right
    found = {point.line: point for point in report.break_points}
    item, branch = lines["x = x * x.detach().sum().abs().item()"], lines["if x.sum() > 1e9:"]
    assert {item, branch} <= set(found)
    assert all(Path(point.file).name == "planted.py" for point in report.break_points)
    assert "keep it a tensor" in instead(found[item])
    assert "torch.where" in instead(found[branch])
    assert found[item].number == "GB0124"
    assert f"planted.py:{item} in forward" in str(report)


def test_a_recompile_names_the_guard() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) + 0 * self.calls

    torch.manual_seed(0)
    report = og.check(Counting(), torch.randn(ROWS, 6), backend="eager")
    assert report.agrees
    assert not report.right
    found = str(report.all_recompiles[0])
    assert "calls" in found
    assert "\n" not in found


# The command


def test_the_command_gives_status_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "report.html", tmp_path / "report.json"
    files = ["--script", str(tmp_path / "s"), "--html", str(page), "--json", str(figures)]
    status = main(["check", "planted:build", "--backend", "planted:drops_a_scale", "--situations", AGAIN, "--steps", "3", *files])
    assert status == 1
    assert "block.halve" in capsys.readouterr().out
    record = json.loads(figures.read_text())
    assert record["status"] == 1
    (report,) = record["reports"]
    assert report["culprit"]["path"] == "block.halve"
    assert report["situations"][0]["outcome"] == "wrong"
    assert len(report["training"]["compiled"]["losses"]) == 3
    assert report["gradient_rows"][0].keys() >= {"name", "norm", "error", "eager_error", "allowed", "wrong"}
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "block.halve" in html
    assert not any(mark in html for mark in ("<script", "<link", "src=", "@import"))


def test_right_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--backend", "eager", "--quick"]
    assert main(["check", "planted:build_breaking", *quick]) == 0
    assert main(["check", "planted:build_breaking", *quick, "--strict"]) == 1
    assert main(["check", "planted:build", *quick, "--strict", "--json", "-"]) == 0
    output = capsys.readouterr().out
    assert json.loads(output[output.index("{\n") :])["status"] == 0


def test_each_method_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    # norm_tuning needs a norm, and there is one
    assert main(["check", "planted:build", "--backend", "eager", "--quick", "--method", "lora,norm_tuning", "--rank", "2", "--strict"]) == 0
    output = capsys.readouterr().out
    assert "lora: right" in output
    assert "norm_tuning: right" in output


def test_an_adapter_file(tmp_path: Path) -> None:
    net, _ = planted.build()
    og.attach(net, og.LoRA(rank=2), targets=["block.linear"]).save(tmp_path / "a.safetensors")
    assert main(["check", "planted:build", "--backend", "eager", "--quick", "--adapter", str(tmp_path / "a.safetensors")]) == 0


COULD_NOT_RUN = {
    "a function that isn't there": ["planted:nothing_here"],
    "a module that isn't there": ["no_such_module:build"],
    "a function that gives something else": ["planted:build_nothing"],
    "a function that fails": ["planted:build_that_fails"],
    "a path that isn't there": ["no-such-folder"],
    "a method that isn't there": ["planted:build", "--method", "lorra"],
    "an adapter that isn't there": ["planted:build", "--adapter", "nothing.safetensors"],
    "a method that finds no layer": ["planted:build", "--quick", "--method", "lora", "--targets", "nothing"],
    "a backend that isn't there": ["planted:build", "--backend", "planted:nothing"],
    "no backend": ["planted:build", "--backend", "no"],
}


@pytest.mark.parametrize("arguments", COULD_NOT_RUN.values(), ids=COULD_NOT_RUN)
def test_what_could_not_run_is_status_2_and_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    backend = [] if "--backend" in arguments else ["--backend", "eager"]
    assert main(["check", *arguments, *backend]) == 2
    assert capsys.readouterr().err.strip()


# What to check


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine_to_check.py"
    file.write_text("import torch\ndef build():\n    return {'model': torch.nn.Linear(2, 3), 'batch': torch.ones(2, 2)}\n")
    target = from_function(f"{file}:build")
    assert isinstance(target.model, nn.Linear)
    assert target.batch.shape == (2, 2)


def sizes() -> dict[str, int]:
    return {"rows": 2, "length": 8, "size": 8}


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=6
    )
    model = LlamaForCausalLM(config)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    target = from_folder(tmp_path, part=None, dtype=torch.bfloat16, **sizes())
    assert "random" in target.note
    assert target.batch["input_ids"].shape == (2, 6)  # no longer than the model takes
    assert next(target.model.parameters()).dtype == torch.bfloat16
    assert torch.isfinite(target.model(**target.batch).loss)


def test_a_part_of_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=2,
        layers_per_block=1,
    )
    unet.save_pretrained(tmp_path / "unet")
    (tmp_path / "model_index.json").write_text("{}")
    target = from_folder(tmp_path, part=None, dtype=None, **sizes())
    assert target.model(**target.batch).sample.shape == (2, 4, 8, 8)
    with pytest.raises(ConfigurationError) as caught:
        from_folder(tmp_path, part="vae", dtype=None, **sizes())
    assert caught.value.code == "part-unknown"


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        from_folder(tmp_path, part=None, dtype=None, **sizes())
    assert caught.value.code == "not-a-model"
    with pytest.raises(ConfigurationError) as unknown:
        batch_for(nn.Linear(2, 2))
    assert unknown.value.code == "batch-unknown"
