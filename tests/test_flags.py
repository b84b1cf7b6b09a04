"""The flags of the command: what each sets, what is refused and how, configuration files, help, and that no setting is ignored."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onegraph.cli.flag import KINDS
from onegraph.cli.flag_help import help_text
from onegraph.cli.network_arguments import LYCORIS_ARGUMENTS, NETWORK_ARGUMENTS
from onegraph.cli.sd_flags import parse
from onegraph.cli.sd_table import FLAGS, GROUPS, flag_label
from onegraph.errors import ConfigurationError, OnegraphError
from onegraph.training.diffusion.configuration import NetworkSettings, TrainingConfiguration
from onegraph.training.diffusion.sampling import ALIASES, SAMPLERS
from onegraph.training.settings import branches, field_of, range_text

LYCORIS = "--network_module=lycoris.kohya"
NEEDED = ["--pretrained_model_name_or_path=m.safetensors", "--train_data_dir=data", "--output_dir=out"]
SOURCE = Path(__file__).resolve().parent.parent / "src" / "onegraph"

# What sd-scripts' train_network.py accepted at the start of 2026: names, nothing else.
SD_SCRIPTS = """
    console_log_level console_log_file console_log_simple v2 v_parameterization pretrained_model_name_or_path tokenizer_cache_dir
    metadata_title metadata_author metadata_description metadata_license metadata_tags metadata_usage_hint metadata_thumbnail
    metadata_merged_from metadata_trigger_phrase metadata_preprocessor metadata_is_negative_embedding
    train_data_dir cache_info shuffle_caption caption_separator caption_extension caption_extention keep_tokens keep_tokens_separator
    secondary_separator enable_wildcard caption_prefix caption_suffix color_aug flip_aug face_crop_aug_range random_crop debug_dataset
    resolution cache_latents vae_batch_size cache_latents_to_disk skip_cache_check enable_bucket min_bucket_reso max_bucket_reso
    bucket_reso_steps bucket_no_upscale resize_interpolation token_warmup_min token_warmup_step alpha_mask dataset_class
    caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate reg_data_dir in_json dataset_repeats
    output_dir output_name huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token
    huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload save_precision save_every_n_epochs
    save_every_n_steps save_n_epoch_ratio save_last_n_epochs save_last_n_epochs_state save_last_n_steps save_last_n_steps_state
    save_state save_state_on_train_end resume train_batch_size max_token_length mem_eff_attn torch_compile dynamo_backend xformers sdpa
    vae max_train_steps max_train_epochs max_data_loader_n_workers persistent_data_loader_workers seed gradient_checkpointing
    gradient_accumulation_steps mixed_precision full_fp16 full_bf16 fp8_base ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph
    clip_skip logging_dir log_with log_prefix log_tracker_name wandb_run_name log_tracker_config wandb_api_key log_config noise_offset
    noise_offset_random_strength multires_noise_iterations ip_noise_gamma ip_noise_gamma_random_strength multires_noise_discount
    adaptive_noise_scale zero_terminal_snr min_timestep max_timestep loss_type huber_schedule huber_c huber_scale lowram highvram
    sample_every_n_steps sample_at_first sample_every_n_epochs sample_prompts sample_sampler config_file output_config prior_loss_weight
    conditioning_data_dir masked_loss deepspeed zero_stage offload_optimizer_device offload_optimizer_nvme_path offload_param_device
    offload_param_nvme_path zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients optimizer_type use_8bit_adam
    use_lion_optimizer learning_rate max_grad_norm optimizer_args lr_scheduler_type lr_scheduler_args lr_scheduler lr_warmup_steps
    lr_decay_steps lr_scheduler_num_cycles lr_scheduler_power fused_backward_pass lr_scheduler_timescale lr_scheduler_min_lr_ratio
    dataset_config min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss weighted_captions
    cpu_offload_checkpointing no_metadata save_model_as unet_lr text_encoder_lr fp8_base_unet network_weights network_module network_dim
    network_alpha network_dropout network_args network_train_unet_only network_train_text_encoder_only training_comment dim_from_weights
    scale_weight_norms base_weights base_weights_multiplier no_half_vae skip_until_initial_step initial_epoch initial_step validation_seed
    validation_split validate_every_n_steps validate_every_n_epochs max_validation_steps
""".split()


def read(*arguments: str) -> TrainingConfiguration:
    return parse([*NEEDED, *arguments])


def value_of(configuration: TrainingConfiguration, path: str) -> Any:
    branch, _, name = path.partition(".")
    return getattr(getattr(configuration, branch), name)


def error(*arguments: str) -> OnegraphError:
    with pytest.raises(OnegraphError) as raised:
        read(*arguments)
    return raised.value


def test_the_command_that_must_work() -> None:
    line = (
        "--pretrained_model_name_or_path=MODEL.ckpt --train_data_dir=DATA --output_dir=OUT --prior_loss_weight=1.0 --resolution=128,128"
        " --train_batch_size=1 --learning_rate=1e-4 --max_train_steps=1600 --use_8bit_adam --xformers --mixed_precision=bf16"
        " --cache_latents --save_precision=fp16 --save_model_as=safetensors --clip_skip=2 --network_module=networks.lora"
    )
    settings = parse(line.split())
    assert (settings.model.path, settings.data.train_data_dir, settings.saving.output_dir) == ("MODEL.ckpt", "DATA", "OUT")
    assert (settings.data.resolution, settings.data.batch_size, settings.data.cache_latents) == ((128, 128), 1, True)
    assert (settings.optimizer.name, settings.optimizer.unet_rate, settings.run.max_train_steps) == ("AdamW8bit", 1e-4, 1600)
    assert (settings.precision.mixed_precision, settings.saving.save_precision, settings.model.clip_skip) == ("bf16", "fp16", 2)
    assert (settings.network.rank, settings.network.effective_alpha) == (4, 1.0)
    assert settings.compile.flags() == {}, "nothing is said: accelerate's settings decide"
    assert len(settings.notes) == 1
    assert settings.notes[0].startswith("--xformers: attention is computed by torch's")


def test_every_flag_of_sd_scripts_is_known() -> None:
    assert [name for name in SD_SCRIPTS if name not in FLAGS] == []


def test_every_flag_does_one_thing_and_has_a_place_in_the_help() -> None:
    for flag in FLAGS.values():
        assert sum(map(bool, (flag.target, flag.note, flag.refusal, not (flag.target or flag.note or flag.refusal)))) == 1
        assert flag.group in GROUPS
        assert bool(flag.refusal) == bool(flag.instead)
        if flag.target:
            field_of(TrainingConfiguration, flag.target)  # the setting is there


# Flags that set something


def sample_of(path: str, kind: str) -> tuple[str, Any]:
    """A text for a flag, and the value it must give: another one than the default."""
    entry = field_of(TrainingConfiguration, path)
    limits = entry.metadata
    if limits["choices"]:
        choice = [choice for choice in limits["choices"] if choice != entry.default][:1] or [entry.default]
        return str(choice[0]), choice[0]
    if kind in ("int", "steps"):
        number = int(limits["low"] if limits["low"] is not None else 0) + 3
        return str(number), number
    if kind in ("float", "alpha", "floats"):
        return "0.75", 0.75
    if kind == "size":
        return "320", (320, 320)
    if kind == "truth":
        return "no", False
    return "something", "something"


SETTERS = [flag for flag in FLAGS.values() if flag.target and flag.kind not in ("switch", "assignments")]


@pytest.mark.parametrize("flag", SETTERS, ids=lambda flag: flag.name)
def test_a_flag_sets_its_setting(flag: Any, tmp_path: Path) -> None:
    text, expected = sample_of(flag.target, flag.kind)
    base = dict(word[2:].split("=") for word in NEEDED)
    base.pop(flag.name, None)
    (tmp_path / "run.toml").write_text("".join(f"{name} = '{value}'\n" for name, value in {**base, flag.name: text}.items()))
    words = [f"--{name}={value}" for name, value in base.items()]
    styles = [[*words, f"--{flag.name}={text}"], [*words, f"--{flag.name}", text], [f"--config_file={tmp_path / 'run.toml'}"]]
    for style in styles:
        found = outcome(style)
        if isinstance(found, TrainingConfiguration):
            assert value_of(found, flag.target) == expected
        else:  # alone it contradicts something, or names what isn't there: then it was read
            assert found.code not in ("unknown-flag", "unsupported-flag", "stray-value", "bad-value"), str(found)


def outcome(words: list[str]) -> TrainingConfiguration | OnegraphError:
    try:
        return parse(words)
    except OnegraphError as found:
        return found


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.target and flag.kind == "switch"], ids=lambda flag: flag.name)
def test_a_switch_sets_its_setting(flag: Any) -> None:
    needs = {
        "noise_offset_random_strength": ["--noise_offset=0.1"],
        "ip_noise_gamma_random_strength": ["--ip_noise_gamma=0.1"],
        "sample_at_first": ["--sample_prompts=p.txt"],
        "dim_from_weights": ["--network_weights=a.safetensors"],
    }
    settings = read(f"--{flag.name}", *needs.get(flag.name, []))
    assert value_of(settings, flag.target) is flag.value
    assert value_of(TrainingConfiguration(), flag.target) != flag.value
    assert value_of(read(f"--{flag.name}=false"), flag.target) == value_of(TrainingConfiguration(), flag.target)


@pytest.mark.parametrize(
    ("name", "value"), [("min_snr_gamma", "0"), ("noise_offset", "0.0"), ("sample_every_n_steps", "0"), ("max_train_epochs", "0")]
)
def test_zero_means_off_where_the_field_writes_it_so(name: str, value: str) -> None:
    assert value_of(read(f"--{name}={value}"), FLAGS[name].target) is None


def test_an_empty_text_says_nothing() -> None:
    assert read("--reg_data_dir=").data.reg_data_dir is None


def test_network_arguments_go_to_their_settings() -> None:
    blocks = ",".join(str(block % 5) for block in range(25))
    settings = read(
        "--network_args", "conv_dim=4", "conv_alpha=none", f"block_dims={blocks}", "down_lr_weight=[1,1,1,1,1,1,.5,.5,.5,0,0,0]",
        "loraplus_lr_ratio=16", "rank_dropout=0.1", "--seed=3",
    )  # fmt: skip
    assert (settings.network.conv_dim, settings.network.conv_alpha, settings.network.rank_dropout) == (4, 0.0, 0.1)
    assert settings.network.block_dims == tuple(block % 5 for block in range(25))
    assert settings.optimizer.down_lr_weight == (1,) * 6 + (0.5,) * 3 + (0,) * 3
    assert settings.optimizer.loraplus_lr_ratio == 16
    assert settings.network.arguments[:2] == ("conv_dim=4", "conv_alpha=none"), "as written, for the file's metadata"
    assert settings.run.seed == 3


@pytest.mark.parametrize("table", [NETWORK_ARGUMENTS, LYCORIS_ARGUMENTS], ids=["networks.lora", "lycoris.kohya"])
def test_network_arguments_have_a_setting(table: Mapping[str, tuple[str, str]]) -> None:
    for kind, target in table.values():
        field_of(TrainingConfiguration, target)
        assert kind in {*KINDS, "ints", "floats"}


def test_arguments_of_lycoris_go_to_their_settings() -> None:
    network = read(
        LYCORIS, "--network_args", "algo=LoKr", "preset=attn-mlp", "factor=8", "decompose_both=True", "use_cp=True", "full_matrix=false",
        "unbalanced_factorization=True", "conv_dim=2", "conv_alpha=0.5", "rank_dropout=0.1", "use_scalar=False", "constraint=0",
        "block_size=4", "bypass_mode=False", "wd_on_output=True", "rs_lora=true",
    ).network  # fmt: skip
    assert (network.module, network.algo, network.preset, network.factor) == ("lycoris.kohya", "lokr", "attn-mlp", 8)
    assert (network.decompose_both, network.use_tucker, network.full_matrix, network.unbalanced_factorization) == (True, True, False, True)
    assert (network.conv_dim, network.conv_alpha, network.rank_dropout, network.rs_lora) == (2, 0.5, 0.1, True)
    assert network.arguments[0] == "algo=LoKr", "as written, for the file's metadata"


def test_conv_alpha_alone_has_a_meaning_in_lycoris() -> None:
    assert read(LYCORIS, "--network_args", "conv_alpha=2").network.conv_alpha == 2
    assert "conv_dim" in str(error("--network_args", "conv_alpha=2"))


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ([], None),
        (["--torch_compile"], "inductor"),
        (["--torch_compile", "--dynamo_backend=aot_eager"], "aot_eager"),
        (["--dynamo_backend=cudagraphs"], "cudagraphs"),
        (["--dynamo_backend=no"], "no"),
        (["--torch_compile=false"], None),
    ],
)
def test_compile_flags(words: list[str], backend: str | None) -> None:
    assert read(*words).compile.flags().get("backend") == backend


def test_compile_flags_carry_only_what_was_said() -> None:
    settings = read("--compile_regions=whole", "--dynamo_use_dynamic=false", "--dynamo_use_fullgraph")
    assert settings.compile.flags() == {"regions": "whole", "dynamic": False, "fullgraph": True}


@pytest.mark.parametrize(("part", "trains"), [("unet", "train_unet"), ("text_encoder", "train_text_encoder")])
def test_a_learning_rate_of_zero_leaves_the_part_out_and_says_so(part: str, trains: str) -> None:
    settings = read(f"--{part}_lr=0")
    assert getattr(settings.network, trains) is False
    assert any(f"--{part}_lr=0" in note for note in settings.notes)


def test_caching_on_disk_is_caching() -> None:
    assert read("--cache_latents_to_disk").data.cache_latents


def test_the_last_of_a_repeated_flag_wins() -> None:
    assert read("--seed=1", "--seed", "2").run.seed == 2


def test_negative_numbers_are_values() -> None:
    assert read("--noise_offset=0.1", "--adaptive_noise_scale", "-0.5").loss.adaptive_noise_scale == -0.5


@pytest.mark.parametrize("name", [flag.name for flag in FLAGS.values() if flag.note])
def test_flags_that_mean_something_else_say_what(name: str) -> None:
    word = f"--{name}" if FLAGS[name].kind == "switch" else f"--{name}=x"
    assert read(word).notes == (f"--{name}: {FLAGS[name].note}",)


# What is refused


@pytest.mark.parametrize("flag", [flag for flag in FLAGS.values() if flag.refusal], ids=lambda flag: flag.name)
def test_known_and_unsupported_flags_say_so_and_what_instead(flag: Any) -> None:
    found = error(f"--{flag.name}" if flag.kind == "switch" else f"--{flag.name}=7")
    assert found.code == "unsupported-flag"
    assert f"--{flag.name} is not supported" in found.what
    assert found.hint == flag.instead
    if flag.kind == "switch":
        read(f"--{flag.name}=false")


@pytest.mark.parametrize("word", ["--validation_split=0.0", "--dataset_repeats=1", "--token_warmup_step=0", "--in_json="])
def test_an_unsupported_flag_that_asks_for_nothing_is_fine(word: str) -> None:
    assert read(word) == read()


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--lerning_rate=1", "--learning_rate"),
        ("--learning-rate=1", "--learning_rate"),
        ("--train_batch=1", "--train_batch_size"),
        ("--Seed=1", "--seed"),
        ("--huggingface_repo_i=x", "--huggingface_repo_id"),
        ("--qqqqqq", "--help"),
    ],
)
def test_unknown_flags_suggest_the_nearest(word: str, hint: str) -> None:
    found = error(word)
    assert found.code == "unknown-flag"
    assert hint in found.hint


def test_an_abbreviation_is_suggested_and_never_taken() -> None:
    found = error("--gradient_acc", "4")
    assert found.code == "unknown-flag"
    assert "--gradient_accumulation_steps" in found.hint


REFUSED = [
    (["--seed=abc"], "bad-value", "whole number"),
    (["--seed=1.5"], "bad-value", "whole number"),
    (["--seed"], "bad-value", "--seed=value"),
    (["--learning_rate=nan"], "bad-value", "a number"),
    (["--learning_rate=-1"], "bad-value", "0 to 1000000"),
    (["--clip_skip=13"], "bad-value", "1 to 12"),
    (["--max_token_length=100"], "bad-value", "75, 150, 225"),
    (["--mixed_precision=bf61"], "bad-value", "did you mean bf16?"),
    (["--resolution=512,512,512"], "bad-value", "width,height"),
    (["--resolution=100,128"], "resolution", "use 96,128"),
    (["--lr_warmup_steps=1.5"], "bad-value", "share of the run"),
    (["--cache_latents=maybe"], "bad-value", "true or false"),
    (["--network_module=lycoris.koya"], "bad-value", "lycoris.kohya"),
    (["--save_model_as=ckpt"], "unsupported-flag", "safetensors"),
    (["--log_with=wandb"], "unsupported-flag", "tensorboard"),
    (["--log_with=tensorboard"], "missing-setting", "--logging_dir"),
    (["--use_8bit_adam", "--optimizer_type=Lion"], "contradiction", "keep one"),
    (["--use_8bit_adam", "--use_lion_optimizer"], "contradiction", "keep one"),
    (["--torch_compile", "--dynamo_backend=no"], "contradiction", "keep one"),
    (["--text_encoder_lr", "1e-4", "1e-5"], "bad-value", "one value"),
    (["--network_args", "conv_dm=4"], "bad-argument", "conv_dim"),
    (["--network_args", "conv_dim=4.5"], "bad-argument", "conv_dim=4"),
    (["--network_args", "conv_dim"], "bad-argument", "conv_dim=4"),
    (["--network_args", "algo=loha"], "bad-argument", "--network_module=lycoris.kohya"),
    ([LYCORIS, "--network_args", "algo=lhoa"], "bad-value", "loha"),
    ([LYCORIS, "--network_args", "algo=dylora"], "bad-argument", "algo=lora"),
    ([LYCORIS, "--network_args", "algo=glora"], "bad-argument", "algo=lora"),
    ([LYCORIS, "--network_args", "facter=4"], "bad-argument", "factor"),
    ([LYCORIS, "--network_args", "block_dims=4"], "bad-argument", "networks.lora"),
    ([LYCORIS, "--network_args", "use_scalar=True"], "bad-argument", "leave it out"),
    ([LYCORIS, "--network_args", "constraint=0.1"], "bad-argument", "leave it out"),
    ([LYCORIS, "--network_args", "wd_on_output=False"], "bad-argument", "leave it out"),
    ([LYCORIS, "--network_args", "preset=mine.toml"], "bad-value", "full-lin"),
    ([LYCORIS, "--network_args", "train_norm=maybe"], "bad-argument", "train_norm=True"),
    ([LYCORIS, "--network_args", "use_cp=True", "use_tucker=True", "algo=loha"], "bad-argument", "keep one"),
    ([LYCORIS, "--network_args", "dropout=0.1", "--network_dropout=0.2"], "contradiction", "keep one"),
    ([LYCORIS, "--network_args", "algo=loha", "dora_wd=True"], "contradiction", "another algo"),
    ([LYCORIS, "--network_args", "algo=loha", "--network_dropout=0.2"], "contradiction", "leave it out"),
    ([LYCORIS, "--network_args", "algo=full", "--scale_weight_norms=1"], "contradiction", "leave it out"),
    ([LYCORIS, "--network_args", "algo=ia3", "rank_dropout=0.1"], "contradiction", "leave it out"),
    ([LYCORIS, "--network_args", "preset=unet-only", "--network_train_text_encoder_only"], "contradiction", "preset=full"),
    (["--network_args", "conv_dim=4", "conv_dim=5"], "bad-argument", "keep one"),
    (["--network_args", "down_lr_weight=sine"], "bad-argument", "1,1,0.5"),
    (["--network_args", "block_dims=1,2"], "block-values", "25"),
    (["--optimizer_args", "weight_deca=1"], "bad-argument", "weight_decay"),
    (["--optimizer_type=AdmW"], "unknown-optimizer", "AdamW"),
    (["--lr_scheduler=cosin"], "unknown-schedule", "cosine"),
    (["--network_train_unet_only", "--network_train_text_encoder_only"], "contradiction", "at most one"),
    (["--dim_from_weights"], "contradiction", "--network_weights"),
    (["--noise_offset_random_strength"], "contradiction", "--noise_offset"),
    (["--min_timestep=900", "--max_timestep=100"], "contradiction", "--min_timestep"),
    (["--random_crop", "--cache_latents"], "contradiction", "one of them"),
    (["--enable_bucket", "--min_bucket_reso=1024", "--max_bucket_reso=512", "--bucket_no_upscale"], "contradiction", "swap"),
    (["--enable_bucket", "--bucket_reso_steps=60"], "contradiction", "64"),
    (["--keep_tokens=2"], "contradiction", "--shuffle_caption"),
    (["--sample_every_n_steps=5"], "contradiction", "--sample_prompts"),
    (["--sample_prompts=p.txt"], "contradiction", "--sample_every_n_steps"),
    (["--save_last_n_epochs=2"], "contradiction", "--save_every_n_epochs"),
    (["--save_every_n_steps=2", "--save_last_n_steps_state=4"], "contradiction", "--save_state"),
    (["--output_name=a/b"], "bad-value", "--output_dir"),
    (["word"], "stray-value", "--flag=value"),
    (["--seed", "1", "2"], "stray-value", "--flag=value"),
    (["--config_file=nowhere.toml"], "config-file", "TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "hint"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_what_is_refused(words: list[str], code: str, hint: str) -> None:
    found = error(*words)
    assert found.code == code, str(found)
    assert hint in f"{found.why} {found.hint}"


def test_missing_settings() -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse([])
    text = str(raised.value)
    assert [problem.code for problem in raised.value.problems] == ["missing-setting"] * 3
    assert all(f"add --{name}=" in text for name in ("pretrained_model_name_or_path", "train_data_dir", "output_dir"))


def test_all_problems_at_once() -> None:
    found = error(
        "--lerning_rate=3", "--resolution=100", "--seed", "abc", "--wandb_api_key=x", "--network_args", "conv_dm=4", "--lr_scheduler=x"
    )
    assert isinstance(found, ConfigurationError)
    assert sorted(problem.code for problem in found.problems) == [
        "bad-argument", "bad-value", "resolution", "unknown-flag", "unknown-schedule", "unsupported-flag",
    ]  # fmt: skip
    assert "6 problems" in str(found)


# Configuration files


def write(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def test_a_file_with_tables_and_the_command_line_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        pretrained_model_name_or_path = "m"
        [folders]
        train_data_dir = "d"
        output_dir = "o"
        [training]
        seed = 1
        learning_rate = 1e-3
        resolution = [256, 128]
        cache_latents = true
        gradient_checkpointing = false
        text_encoder_lr = 5e-5
        [network]
        network_args = ["conv_dim=4"]
        [network.optimizer_args]
        weight_decay = 0.1
        """,
    )
    settings = parse(["--config_file", path, "--seed=2"])
    assert (settings.run.seed, settings.optimizer.learning_rate, settings.data.resolution) == (2, 1e-3, (256, 128))
    assert (settings.data.cache_latents, settings.run.gradient_checkpointing) == (True, False)
    assert (settings.optimizer.text_encoder_lr, settings.network.conv_dim) == (5e-5, 4)
    assert settings.optimizer.arguments == ("weight_decay=0.1",)


def test_a_file_without_its_ending(tmp_path: Path) -> None:
    path = write(tmp_path, "seed = 5\n")
    assert read("--config_file", path.removesuffix(".toml")).run.seed == 5


def test_false_on_the_command_line_wins_over_true_in_the_file(tmp_path: Path) -> None:
    assert not read("--config_file", write(tmp_path, "cache_latents = true"), "--cache_latents=false").data.cache_latents


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("lerning_rate = 1", "unknown-flag", ("run.toml", "lerning_rate", "learning_rate")),
        ("seed = 'abc'", "bad-value", ("seed in", "run.toml", "abc")),
        ("seed = [1]", "bad-value", ("seed in", "run.toml")),
        ("seed = true", "bad-value", ("seed in", "run.toml")),
        ("resolution = 100", "resolution", ("resolution in", "run.toml")),
        ("clip_skip = 99", "bad-value", ("clip_skip in", "run.toml", "1 to 12")),
        ("wandb_api_key = 'x'", "unsupported-flag", ("wandb_api_key in", "run.toml")),
        ("seed = 1\n[a]\nseed = 2", "config-file", ("given twice", "seed")),
        ("seed : 1", "config-file", ("is not TOML", "line 1")),
    ],
)
def test_errors_carry_file_and_key(tmp_path: Path, text: str, code: str, words: tuple[str, ...]) -> None:
    found = error("--config_file", write(tmp_path, text))
    assert found.code == code
    assert all(word in str(found) for word in words), str(found)


# The settings themselves


def test_json_round_trip() -> None:
    settings = read(
        "--resolution=256,128", "--network_args", "down_lr_weight=1,1,1,1,1,1,1,1,1,1,1,.5", "--optimizer_args", "eps=1e-6", "--sdpa"
    )
    again = TrainingConfiguration.from_json(settings.to_json())
    assert again == settings
    assert isinstance(again.data.resolution, tuple)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "not JSON"),
        ('{"run": {"sed": 1}}', "'sed'"),
        ('{"run": {"seed": "x"}}', "seed in settings.run is 'x'"),
        ('{"run": 3}', "settings.run"),
        ('{"data": {"resolution": [1]}}', "resolution in settings.data"),
    ],
)
def test_json_that_does_not_fit(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        TrainingConfiguration.from_json(text)
    assert raised.value.code == "settings-file"


def test_every_setting_is_documented_and_checked() -> None:
    for path, _ in branches(TrainingConfiguration()):
        entry = field_of(TrainingConfiguration, path)
        assert len(str(entry.metadata["meaning"])) > 10, path
        if entry.type in ("int", "int | None", "float", "float | None") and path != "loss.adaptive_noise_scale":
            assert range_text(entry), f"{path} has no range"


def test_fp16_on_a_cpu_offers_bf16() -> None:
    settings = read("--mixed_precision=fp16")
    settings.check("cuda")
    with pytest.raises(ConfigurationError, match="CPU") as raised:
        settings.check("cpu")
    assert "bf16" in raised.value.hint
    read("--mixed_precision=fp16", "--allow_fp16_on_cpu").check("cpu")


def test_alpha_of_none_is_the_rank() -> None:
    assert read("--network_alpha=none", "--network_dim=8").network.effective_alpha == 8.0
    assert NetworkSettings(dim=8, alpha=0.0).effective_alpha == 8.0


# Nothing is accepted and ignored

# read by the file's metadata, and nowhere else
ACT_IN_METADATA = {"author", "description", "license", "tags", "training_comment", "title", "no_metadata"}
# read where they are checked, and nowhere else
ACT_IN_CHECKS = {"allow_fp16_on_cpu", "module", "color_augmentation"}
NOT_READERS = ("configuration.py", "contradictions.py", "metadata.py", "state.py")


def names_read() -> set[str]:
    """Every attribute that is read somewhere in the package but where settings are only stored, checked or recorded."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name in NOT_READERS or "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # getattr(settings, "dropout")
    return names


def test_every_setting_is_read_where_it_acts() -> None:
    own = {entry.name: entry for branch in dataclasses.fields(TrainingConfiguration) for entry in fields_of(branch.name)}
    through = {"down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"}  # read as block_lr_weights
    through |= {"dim", "learning_rate", "unet_lr", "text_encoder_lr", "output_name"}  # read as rank, the rates, name
    read_somewhere = names_read()
    assert {"block_lr_weights", "rank", "rate", "unet_rate", "text_encoder_rate"} <= read_somewhere
    metadata = (SOURCE / "training" / "diffusion" / "metadata.py").read_text()
    assert all(f"saving.{name}" in metadata for name in ACT_IN_METADATA)
    assert sorted(own.keys() - read_somewhere - ACT_IN_METADATA - ACT_IN_CHECKS - through) == []


def fields_of(branch: str) -> tuple[dataclasses.Field[Any], ...]:
    value = getattr(TrainingConfiguration(), branch)
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def test_every_sampler_can_be_asked_for() -> None:
    choices = field_of(TrainingConfiguration, "sampling.sampler").metadata["choices"]
    assert sorted(choices) == sorted([*SAMPLERS, *ALIASES])


# Help


def test_help_names_every_flag_its_range_and_default() -> None:
    text = help_text(100)
    assert all(f"--{name}" in text for name in FLAGS)
    assert all(f"\n{group}:" in text for group in GROUPS)
    assert "optimizer steps (1 or more; default 1600)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_help_exits_at_once_and_imports_no_torch() -> None:
    program = (
        "import sys; from onegraph.cli.sd_flags import parse\ntry: parse(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
    )
    program += "parse(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, *NEEDED], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--pretrained_model_name_or_path" in done.stdout


@pytest.mark.parametrize("path", ["run.seed", "network.conv_dim", "loss.min_snr_gamma"])
def test_labels(path: str) -> None:
    assert (
        flag_label(path)
        == {"run.seed": "--seed", "network.conv_dim": "--network_args conv_dim", "loss.min_snr_gamma": "--min_snr_gamma"}[path]
    )
