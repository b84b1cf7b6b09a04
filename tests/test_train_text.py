"""``onegraph train text``: whole runs of a tiny model, what they write, how they stop and go on, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import onegraph
from onegraph.cli import main as command
from onegraph.cli.text_settings import ALIASES, FLAGS, label, read_configuration
from onegraph.errors import OnegraphError
from onegraph.training import places
from onegraph.training.settings import branches, field_of
from onegraph.training.text import loop
from onegraph.training.text.attaching import OFFERED
from onegraph.training.text.configuration import TextConfiguration
from tiny_text import chat, flags, pairs, train, weights, write_model, write_rows
from watched_runs import after_step, outcomes_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", pairs(12))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[loop.Outcome]:
    """How each run of this test ended."""
    return outcomes_of(loop.Loop, monkeypatch)


def assert_same(left: Path, right: Path) -> None:
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# Whole runs


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 asks for it
def test_the_loss_falls_and_both_formats_hold_what_was_learnt(
    model: Path, rows: Path, tmp_path: Path, outcomes: list[loop.Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    out = tmp_path / "out"
    assert train(flags(model, rows, out, "--steps", "30", "--validation-share", "0.2", "--evaluate-every", "10", "--packing")) == 0
    (outcome,) = outcomes
    steps, losses = zip(*outcome.evaluations.found, strict=True)
    assert steps == (0, 10, 20, 30)
    assert losses[-1] < losses[0] - 0.1
    record = json.loads((out / "adapter" / "training.json").read_text())
    assert record["held_out_loss"] == [list(pair) for pair in outcome.evaluations.found]
    assert record["configuration"]["method"]["name"] == "lora"
    assert "held out    loss" in capsys.readouterr().out

    ids = torch.arange(8)[None]
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(out / "adapter"))
    assert theirs.peft_config["default"].task_type == "CAUSAL_LM"
    assert theirs.peft_config["default"].base_model_name_or_path == str(model)
    for place in (out / "adapter", out / "adapter" / "onegraph.safetensors"):
        ours = AutoModelForCausalLM.from_pretrained(model)
        before = ours(ids).logits
        onegraph.load(ours, place, name="default")
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ours(ids).logits, before, atol=1e-2)


@pytest.mark.parametrize(
    ("backend", "num_widths", "more"),
    [
        ("eager", 3, []),
        ("eager", 1, ["--packing"]),
        ("aot_eager", 1, ["--gradient-checkpointing", "--precision", "bf16"]),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(
    model: Path,
    tmp_path: Path,
    outcomes: list[loop.Outcome],
    backend: str,
    num_widths: int,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [*pairs(6), *[chat("say it", "long " * 8)] * 3])
    arguments = flags(model, data, tmp_path / "out", "--validation", str(data), "--set", f"data.num_widths={num_widths}", *more)
    arguments[arguments.index("--steps") : arguments.index("--steps") + 2] = ["--epochs", "2"]
    arguments[arguments.index("--backend") + 1] = backend
    assert train([*arguments, "--check", "strict"]) == 0
    text = capsys.readouterr().out
    assert outcomes[0].recompiles == []
    assert "0 graph breaks" in text
    assert "0 recompiles during training" in text
    assert int(re.findall(r"(\d+) graphs for", text)[0]) <= 6  # first block and the others, one width and any width, and evaluation
    assert text.count("compiled and eager agree") == num_widths
    assert len(outcomes[0].evaluations.found) == 3


def test_a_recompile_is_reported(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[loop.Outcome]
) -> None:
    """The control of the test above: a step in another state than the warm-up's."""

    def change(self: loop.Loop) -> None:
        self.training.recipe.model.eval()

    after_step(loop.Loop, 2, change, monkeypatch)
    arguments = flags(model, rows, tmp_path / "out", "--set", "data.num_widths=1", "--check", "off")
    arguments[arguments.index("--backend") + 1] = "eager"
    assert train(arguments) == 0
    assert outcomes[0].recompiles


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_every_method_trains_by_its_name(model: Path, rows: Path, tmp_path: Path, name: str, outcomes: list[loop.Outcome]) -> None:
    targets = {"dense": ["--targets", "o_proj"], "bitfit": ["--targets", "q_proj"], "vera": ["--targets", "q_proj"]}
    source = model
    if name == "bitfit":
        from tiny_text import tiny_llama

        source = write_model(tmp_path / "biased", model=tiny_llama(attention_bias=True))
    further = {"vblora": ["--method-arguments", "vector_length=4", "num_vectors=8"], "miss": ["--method-arguments", "rank=4"]}
    more = ["--steps", "2", "--method", name, *targets.get(name, []), *further.get(name, [])]
    assert train(flags(source, rows, tmp_path / "out", *more)) == 0
    assert (tmp_path / "out" / "adapter" / "onegraph.safetensors").is_file()
    assert len(outcomes[0].losses) == 2


@pytest.mark.parametrize("stop", [signal.SIGTERM, None])
def test_a_stopped_run_goes_on_as_if_it_never_stopped(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[loop.Outcome], stop: signal.Signals | None
) -> None:
    more = [
        "--steps",
        "8",
        "--accumulation",
        "2",
        "--method-arguments",
        "input_dropout=0.2",
        "--validation-share",
        "0.2",
        "--schedule",
        "cosine",
    ]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert train(flags(model, rows, straight, *more)) == 0
    with monkeypatch.context() as patch:
        if stop is not None:
            after_step(loop.Loop, 4, lambda _: os.kill(os.getpid(), stop), patch)
            assert train(flags(model, rows, stopped, *more)) == 128 + stop
            state = stopped / "adapter-state"
        else:  # a state that was saved on the way, of a run that was killed later
            assert train(flags(model, rows, stopped, *more, "--save-every", "4", "--save-state")) == 0
            state = stopped / "adapter-step00000004-state"
    assert train(flags(model, rows, stopped, *more, "--resume", str(state))) == 0
    assert_same(straight / "adapter", stopped / "adapter")
    assert outcomes[0].losses[4:] == outcomes[-1].losses
    assert outcomes[0].evaluations.found == outcomes[-1].evaluations.found
    if stop is not None:
        return
    # the comparison can fail: without the random generators the dropouts are others
    monkeypatch.setattr("onegraph.training.state.restore_random_states", lambda states: None)
    assert train(flags(model, rows, stopped, *more, "--resume", str(state))) == 0
    assert outcomes[0].losses[4:] != outcomes[-1].losses


def test_a_state_of_another_run_is_refused(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(flags(model, rows, tmp_path / "out", "--save-state")) == 0
    again = ["--resume", str(tmp_path / "out" / "adapter-state"), "--steps", "8"]
    assert train(flags(model, rows, tmp_path / "out", *again, "--learning-rate", "1")) == 2
    assert "[resume-differs]" in capsys.readouterr().err
    other = write_rows(tmp_path / "other.jsonl", pairs(11))
    assert train(flags(model, other, tmp_path / "out", *again)) == 2
    assert "another data set" in capsys.readouterr().err
    assert train(flags(model, rows, tmp_path / "out", *again)) == 0


def test_the_run_ends_when_the_held_out_loss_no_longer_falls(
    model: Path, rows: Path, tmp_path: Path, outcomes: list[loop.Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--steps", "40", "--evaluate-every", "2", "--validation", str(rows)]
    assert train(flags(model, rows, tmp_path / "still", *more, "--learning-rate", "0", "--patience", "3")) == 0
    assert outcomes[0].position.step == 6
    assert outcomes[0].early
    assert "the held-out loss no longer falls" in capsys.readouterr().out
    assert not (tmp_path / "still" / "adapter-best").exists()
    # the loss of random answers falls, then rises: the lowest is kept beside the last
    assert train(flags(model, rows, tmp_path / "falls", *more, "--steps", "6", "--patience", "3")) == 0
    assert not outcomes[1].early
    assert (tmp_path / "falls" / "adapter-best" / "adapter_model.safetensors").is_file()


def test_saves_on_the_way_and_what_goes(model: Path, rows: Path, tmp_path: Path) -> None:
    more = ["--steps", "7", "--save-every", "2", "--save-state", "--set", "saving.keep_last=2", "--output-name", "x"]
    assert train(flags(model, rows, tmp_path / "out", *more)) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["x", "x-state", "x-step00000004", "x-step00000004-state", "x-step00000006", "x-step00000006-state"]


def test_a_folder_that_no_run_wrote_stays(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "out" / "x" / "thesis" / "chapter.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert train(flags(model, rows, tmp_path / "out", "--steps", "1", "--output-name", "x")) == 2
    assert "[folder-taken]" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_a_folder_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(places.os, "open", refused)
    with pytest.raises(OnegraphError, match="Permission denied") as raised, places.sole_writer(tmp_path, "x"):
        pass
    assert raised.value.code == "not-writable"


def test_a_loss_that_is_not_finite_stops_the_run(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_it(self: loop.Loop) -> None:
        with torch.no_grad():
            next(iter(self.training.parameters.values())).fill_(float("nan"))

    after_step(loop.Loop, 2, break_it, monkeypatch)
    assert train(flags(model, rows, tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "Step 3: the loss is nan, for" in error
    assert "rows.jsonl:" in error
    assert "[loss-not-finite]" in error
    assert not (tmp_path / "out" / "adapter").exists()


# Settings


def test_a_file_with_flags_over_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\ntrain = "rows.jsonl"\npacking = true\n[run]\nseed = 7\nmax_train_steps = 10\n'
        '[method]\nname = "dora"\nrank = 4\ntargets = ["q_proj", "v_proj"]\n'
        '[saving]\noutput_dir = "out"\n[optimizer]\nlearning_rate = 1\n'
    )
    found = read_configuration(["--config", str(path), "--seed=8", "--no-packing", "--batch_size", "3", "--set", "data.long=drop"])
    assert found.problems() == []
    assert (found.run.seed, found.data.packing, found.data.batch_size, found.data.long) == (8, False, 3, "drop")
    assert (found.data.train, found.run.max_train_steps, found.optimizer.learning_rate) == (("rows.jsonl",), 10, 1)
    assert (found.method.name, found.method.arguments, found.method.targets) == ("dora", ("rank=4",), ("q_proj", "v_proj"))
    assert read_configuration(["--config", str(path), "--method", "oft"]).method.arguments == ()  # the fields were DoRA's
    over = read_configuration(["--config", str(path), "--method-arguments", "alpha=3", "--set", "method.rank=8"])
    assert over.method.arguments == ("alpha=3", "rank=8")
    path.write_text('method = "hra"\n')
    assert read_configuration(["--config", str(path)]).method.name == "hra"


def test_accelerates_names_do_too() -> None:
    found = read_configuration(["--dynamo_backend=no", "--mixed_precision", "bf16", "--dynamo_use_dynamic=no", "--max_train_steps", "5"])
    assert (found.compile.backend, found.precision.mixed_precision, found.compile.dynamic) == ("no", "bf16", False)
    assert found.run.max_train_steps == 5
    assert [path for path in ALIASES.values() if not field_of(TextConfiguration, path)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nsed = 3\n", "[run] in {path} has an unknown field 'sed'|did you mean seed?"),
        ("[run]\nx = 3\n", "it has max_train_steps, "),
        ("[dta]\ntrain = 'a'\n", "there is no table [dta]|did you mean [data]?"),
        ("seed = 3\n", "seed stands in no table|it belongs under [run]"),
        ("run = 3\n", "run is a table"),
        ("[run]\nseed = 'a'\n", "seed in [run] in {path} is 'a'"),
        ("[run\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(OnegraphError) as caught:
        read_configuration(["--config", str(path)])
    assert [word for word in words.format(path=path).split("|") if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--stpes", "3"], "unknown-flag", "did you mean --steps?"),
        (["--rank", "8"], "unknown-flag", "--method-arguments rank=..."),
        (["--min_improvement", "3"], "unknown-flag", "--set evaluation.min_improvement=..."),
        (["--set", "run.sed=3"], "unknown-flag", "did you mean run.seed?"),
        (["--steps", "many"], "bad-value", "many"),
        (["--config", "nowhere.toml"], "config-file", "can't be read"),
        (["3"], "stray-value", "'3' belongs to no flag"),
    ],
)
def test_a_mistake_in_the_flags(arguments: list[str], code: str, words: str) -> None:
    with pytest.raises(OnegraphError) as caught:
        read_configuration(arguments)
    assert caught.value.code == code
    assert words in str(caught.value)


def test_all_problems_at_once_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "text", "--train-on", "answer", "--patience", "2", "--optimizer", "AdamX", "--steps", "0"]) == 2
    error = capsys.readouterr().err
    for words in ("model.path (--model) is missing", "data.train (--data) is missing", "saving.output_dir (--output-dir) is missing"):
        assert words in error
    for words in ("did you mean answers?", "no rows are held out", "run.max_train_steps (--steps) is 0", "[unknown-optimizer]"):
        assert words in error


def test_every_flag_names_a_setting_and_the_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["train", "text", "--help"])
    text = capsys.readouterr().out
    assert [flag for flag in FLAGS if f"--{flag}" not in text] == []
    assert label("run.seed") == "run.seed (--seed)"


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--method", "lorra"], "method-unknown", "did you mean lora or vblora? The methods are lora, dora,"),
        (["--method-arguments", "rnk=3"], "settings-file", "method lora has an unknown field 'rnk'"),
        (["--set", "method.rnk=3"], "settings-file", "did you mean rank?"),
        (["--method-arguments", "rank=0"], "rank", "rank"),
        (["--targets", "q_prj"], "no-target-matched", "q_proj"),
        (["--method", "vblora"], "no-target-matched", "vblora with these fields can take none of the linear layers"),
        (["--model", "nowhere/at/all"], "language-model", "There is no folder"),
        (["--model", "nowhere/model"], "language-model", "There is no folder nowhere/model here, and as a name on the Hub"),
        (["--model", "none.gguf"], "language-model", "There is no none.gguf"),
        (["--validation-share", "0.99"], "nothing-to-learn", "leaves nothing to learn"),
        (["--resume", "nowhere"], "state-not-found", "nowhere"),
        (["--packing", "--max-length", "2049"], "bad-value", "has 2048 positions"),
        (["--chat-template", "nowhere.jinja"], "chat-template", "nowhere.jinja"),
    ],
)
def test_what_is_refused_before_the_first_step(
    model: Path, rows: Path, tmp_path: Path, more: list[str], code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(model, rows, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert f"[{code}]" in error
    assert words in error
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_model_whose_files_lack_weights_is_refused(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = Path(shutil.copytree(model, tmp_path / "cut"))
    held = load_file(cut / "model.safetensors")
    held.pop("model.layers.1.mlp.up_proj.weight")
    save_file(held, cut / "model.safetensors", metadata={"format": "pt"})
    assert train(flags(cut, rows, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "has no weights for 1 tensors of LlamaForCausalLM: model.layers.1.mlp.up_proj.weight" in error


def test_every_setting_is_in_the_document(root: Path) -> None:
    text = (root / "docs" / "training-text.md").read_text(encoding="utf-8")
    assert [path for path in branches_of_settings() if f"| `{path.partition('.')[2]}` |" not in text] == []
    flagged = set(re.findall(r"\| `--([a-z-]+)` \|", text))
    assert flagged == set(FLAGS)


def branches_of_settings() -> list[str]:
    return [path for path, _ in branches(TextConfiguration())]


def test_diffusion_is_the_other_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "diffusion", "--no_such_flag=1"]) == 2
    assert "unknown flag --no_such_flag" in capsys.readouterr().err
