"""The check with what users hand to it: odd outputs and inputs, functions that exit, full disks, readers that go away."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import odd_models
import onegraph as og
import planted
from onegraph.checking import batches, script
from onegraph.checking.breaks import instead
from onegraph.checking.targets import from_folder, from_function
from onegraph.cli import check as command
from onegraph.cli.main import main
from onegraph.compiling import BreakPoint
from onegraph.errors import ConfigurationError, ModelFileError, NumericsError, OutputError

checking = importlib.import_module("onegraph.checking.check")  # the function of that name hides it
QUICK = ["--backend", "eager", "--quick"]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # random.random breaks the graph
@pytest.mark.parametrize("make", odd_models.HEALTHY.values(), ids=odd_models.HEALTHY)
def test_a_healthy_odd_model_raises_no_alarm(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, batch = make()
    report = og.check(
        model, batch, backend="eager", fullgraph=False, thorough=["gradients of the inputs"] if isinstance(batch, dict) else (), steps=2
    )
    assert report.agrees, str(report)
    assert all(row.norm > 0 for row in report.outputs)


def test_a_fault_in_complex_numbers_is_found() -> None:
    """Their imaginary part counts: a backend that turns the sign of it alone is wrong."""

    def conjugates(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        return lambda *arguments: tuple(out.conj() if out.is_complex() else out for out in graph.forward(*arguments))

    model, batch = odd_models.HEALTHY["complex weights"]()
    report = og.check(model, batch, backend=conjugates, loss=lambda output: output.real.square().mean())
    assert not report.agrees
    assert report.comparison.right  # the real part, and so the loss, is right


def test_a_dropout_by_hand_is_seen_in_a_model_that_is_in_evaluation() -> None:
    model, batch = odd_models.HEALTHY["a dropout by hand in a model that is in evaluation"]()
    report = og.check(model, batch, backend="eager")
    assert "random numbers of its own" in report.notes[0]
    assert not any(module.training for module in model.modules())


def test_inside_autocast_gradients_are_there_and_a_fault_is_found() -> None:
    """Torch keeps what it casts: weights that were cast without gradients would have none, compiled and eager alike."""
    net, x = planted.build()
    with torch.autocast("cpu", torch.bfloat16):
        healthy = og.check(net, x, backend="planted:healthy", thorough=["gradients of the inputs", "weights changed in place"], steps=2)
        faulty = og.check(net, x, backend="planted:zeroes_one_gradient")
    assert healthy.right, str(healthy)
    assert healthy.comparison.eager_total_error < 0.1
    assert all(row.compiled_norm > 0 for row in healthy.comparison.rows)
    assert [row.name for row in faulty.comparison.faults] == ["block.linear.weight"]


def test_where_eager_itself_is_far_off_agreement_is_called_weak() -> None:
    model = odd_models.Odd(lambda _, y: y if y.dtype == torch.float64 else y * 0.5)
    report = og.check(model, odd_models.X, backend="eager")
    assert report.comparison.right
    assert "eager itself is off by" in report.notes[0]
    assert not og.check(*odd_models.build(), backend="eager").notes


def test_any_seed_will_do() -> None:
    torch.manual_seed(-1)
    assert og.check(*odd_models.build(), backend="eager").right


def test_a_model_that_keeps_something_between_calls_cannot_be_compared() -> None:
    with pytest.raises(NumericsError) as caught:
        og.check(*odd_models.build_counted(), backend="eager")
    assert caught.value.code == "not-repeatable"


@pytest.mark.parametrize(
    ("build", "said"), [(odd_models.build_detached, "depend on anything"), (odd_models.build_with_rows_of_losses, r"shape \(4,\)")]
)
def test_a_loss_without_gradients_is_said(build: Callable[[], tuple[Any, ...]], said: str) -> None:
    model, batch, *loss = build()
    with pytest.raises(ConfigurationError, match=said) as caught:
        og.check(model, batch, loss=loss[0] if loss else None, backend="eager")
    assert caught.value.code == "no-loss"


def test_a_reference_must_not_be_coarser_than_the_model() -> None:
    with pytest.raises(ConfigurationError) as caught:
        og.check(*odd_models.build(), backend="eager", reference=torch.bfloat16)
    assert caught.value.code == "reference-coarse"


def test_a_backend_that_fails_at_another_shape_is_wrong_there(tmp_path: Path) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if any(isinstance(value, torch.Tensor) and value.shape[:1] == (5,) for value in inputs):
            raise RuntimeError("five rows are too many")
        return graph.forward

    report = og.check(*odd_models.build(), backend=fails, dynamic=False, thorough=["one row more", "one row"], steps=0)
    assert [variation.outcome for variation in report.variations] == ["wrong", "right"]
    assert "five rows are too many" in str(report)
    assert not report.agrees
    assert report.culprit is None  # there is no wrong number to look for


def test_a_model_that_writes_into_its_batch_gets_copies() -> None:
    """Each call would see what the last one wrote."""
    model = odd_models.Odd(lambda _, y: y)
    model.layers.insert(0, odd_models.Doubles())
    x = odd_models.X.clone()
    report = og.check(model, x, backend="eager", thorough=["gradients of the inputs", "the first batch again"], steps=3)
    assert report.right, str(report)
    assert {variation.outcome for variation in report.variations} == {"right"}
    assert torch.equal(x, odd_models.X)


def test_a_fault_beside_modules_that_work_in_place_is_found() -> None:
    """Alone, such a module gets an input that torch lets nobody write into."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.ReLU(inplace=True), planted.Halve())
    report = og.check(net, odd_models.X, backend="planted:drops_a_scale", bisect=True)
    assert report.culprit is not None
    assert report.culprit.path == "4"


def test_a_search_that_fails_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost the way")

    monkeypatch.setattr(checking, "find_culprit", fails)
    net, x = planted.build()
    report = og.check(net, x, backend="planted:drops_a_scale", bisect=True)
    assert not report.agrees
    assert "lost the way" in str(report)


def test_where_nothing_was_compiled_nothing_is_right() -> None:
    report = og.check(*odd_models.build_lstm(), backend="eager", fullgraph=False, steps=2)
    assert report.agrees
    assert not report.right
    assert report.compiled_nothing
    assert not report.break_points  # the check's own code is none of the model's
    # a model that was compiled before keeps its graphs, and needs none
    model, x = odd_models.build()
    og.compile(model, backend="eager")
    assert og.check(model, x).right
    assert og.check(model, x).right


def test_a_fault_stays_found_when_its_script_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OutputError("The disk is full.", code="disk-full")

    monkeypatch.setattr(script, "atomic_write_all", full)
    net, x = planted.build()
    report = og.check(net, x, backend="planted:drops_a_scale", bisect=True, script=tmp_path)
    assert report.culprit is not None
    assert report.culprit.path == "block.halve"
    assert "The disk is full" in report.culprit.note


# The command


COULD_NOT_RUN = {
    "a function that exits": ["odd_models:build_that_exits"],
    "a model that exits": ["odd_models:build_that_leaves"],
    "a function that needs arguments": ["odd_models:build_of"],
    "a loss that is no function": ["odd_models:build_with_a_number_as_loss"],
    "a device that isn't there": ["odd_models:build", "--device", "no-such-device"],
    "no method": ["odd_models:build", "--method", ","],
    "a page in a folder that isn't there": ["odd_models:build", "--html", "no-such-folder/page.html"],
    "a script below a file": ["odd_models:build", "--script", __file__],
    "nothing compiled": ["odd_models:build_lstm"],
}


@pytest.mark.parametrize("arguments", COULD_NOT_RUN.values(), ids=COULD_NOT_RUN)
def test_what_could_not_run_is_status_2_and_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments, *QUICK]) == 2
    said = capsys.readouterr()
    assert said.err.strip() or "NOTHING" in said.out


@pytest.mark.parametrize("flag", [["--batch-size", "0"], ["--steps", "-1"], ["--rank", "x"], ["--length", "0"]])
def test_numbers_out_of_range_are_refused(flag: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "odd_models:build", *flag])
    assert caught.value.code == 2


def test_standard_output_holds_the_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "odd_models:build_a_list", *QUICK, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["status"] == 0
    assert "built" in output.err


def test_a_model_with_whole_numbers_among_its_weights() -> None:
    assert main(["check", "odd_models:build_with_whole_numbers", *QUICK]) == 0


def test_a_reader_that_went_away_changes_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["check", "planted:build", "--backend", "planted:drops_a_scale", "--quick", "--script", ""]) == 1


def test_a_fault_of_our_own_is_no_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(command, "page", broken)
    assert main(["check", "odd_models:build", *QUICK, "--html", str(tmp_path / "page.html")]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_all_methods_are_those_that_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """OFT's blocks don't divide 6 columns by default; alone that is a mistake, among all it is said."""
    kept = {name: command._METHODS[name] for name in ("miss", "oft")}
    monkeypatch.setattr(command, "_METHODS", kept)
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    files = ["--html", str(page), "--json", str(figures)]
    assert main(["check", "odd_models:build", *QUICK, "--rank", "2", "--method", "all", *files]) == 0
    assert "oft: not tried: oft fits no layer" in capsys.readouterr().out
    assert [skipped["name"] for skipped in json.loads(figures.read_text())["skipped"]] == ["oft"]
    assert "oft: not tried" in page.read_text()
    assert main(["check", "odd_models:build", *QUICK, "--method", "oft"]) == 2
    assert "oft fits no layer" in capsys.readouterr().err
    monkeypatch.setattr(command, "_METHODS", {"oft": kept["oft"]})
    assert main(["check", "odd_models:build", *QUICK, "--method", "all"]) == 2


def test_names_in_any_script_are_drawn(tmp_path: Path) -> None:
    page = tmp_path / "页.html"
    assert main(["check", "odd_models:build_named", *QUICK, "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "层 $x_$&lt;b&gt;" in text
    assert "<b>" not in text
    # and the axis is still one of powers of ten
    assert "mathdefault" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_each_of_several_methods_has_a_folder_for_its_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[Path | None] = []

    def noted(*_: Any, script: Path | None, **__: Any) -> None:
        folders.append(script)
        raise ConfigurationError("enough is known", code="no-loss")

    monkeypatch.setattr(command, "check", noted)
    arguments = ["odd_models:build", *QUICK, "--rank", "2", "--method"]
    assert main(["check", *arguments, "lora,dora", "--script", str(tmp_path)]) == 2
    assert main(["check", *arguments, "lora", "--script", str(tmp_path)]) == 2
    assert main(["check", *arguments, "lora", "--script", ""]) == 2
    assert folders == [tmp_path / "lora", tmp_path / "dora", tmp_path, None]


# What to check


def test_what_a_function_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "needy_to_check.py").write_text("import no_such_library\n")
    with pytest.raises(ConfigurationError, match="it imports no_such_library"):
        from_function(f"{tmp_path}/needy_to_check.py:build")
    with pytest.raises(ConfigurationError, match="it has build_of"):
        from_function("odd_models:build_off")


@pytest.mark.parametrize("text", ["[1]", "{", "\udcff", '{"architectures": "LlamaForCausalLM"}', '{"_class_name": "DDIMScheduler"}'])
def test_a_configuration_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelFileError) as caught:
        from_folder(tmp_path, part=None, dtype=None, rows=2, length=8, size=8)
    assert caught.value.code in {"model-config", "not-supported"}


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError) as caught:
        from_folder(tmp_path, part=None, dtype=None, rows=2, length=8, size=8)
    assert f"--adapter {tmp_path}" in caught.value.hint


def test_weights_of_one_variant_alone_are_found(tmp_path: Path) -> None:
    from diffusers.models.unets.unet_2d import UNet2DModel

    config: dict[str, Any] = {"block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    model = UNet2DModel(sample_size=8, norm_num_groups=2, layers_per_block=1, add_attention=False, **config)
    model.save_pretrained(tmp_path, variant="fp16")
    target = from_folder(tmp_path, part=None, dtype=None, rows=2, length=8, size=8)
    assert not target.note
    assert torch.equal(target.model.conv_in.weight, model.conv_in.weight)


def test_a_batch_for_flux_and_for_an_encoder_with_a_decoder() -> None:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    flux = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True, **sizes
    )
    assert torch.isfinite(flux(**batches.batch_for(flux, size=4)).sample).all()
    text = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    assert torch.isfinite(text(**batches.batch_for(text, length=4)).loss)


@pytest.mark.parametrize(
    ("source", "reason", "advice"),
    [
        ("y = x * random.random()", "Attempted to call function marked as skipped. A builtin (e.g. _warnings.warn)", "pass the result in"),
        ("y = x.sum().item()", "Unsupported Tensor.item() call", "keep it a tensor"),
        ("if x.sum() > 0:", "a branch or loop whose condition is a tensor's value", "torch.where"),
    ],
)
def test_the_line_itself_decides_what_to_write_instead(source: str, reason: str, advice: str) -> None:
    assert advice in instead(BreakPoint(file="m.py", line=1, function="forward", source=source, reason=reason))


def test_the_number_of_a_break_alone_gives_no_advice_of_another_library() -> None:
    point = BreakPoint(file="m.py", line=1, function="forward", source="s.nbytes()", reason="Unsupported method call", number="GB0156")
    assert "peft" not in instead(point)
