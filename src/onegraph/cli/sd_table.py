"""The flags of sd-scripts' ``train_network.py`` and our own, in one table: what each sets, means, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onegraph.cli.flag import Flag

GROUPS = (
    "model", "data", "network", "optimizer", "learning-rate schedule", "noise and loss", "precision", "compiling", "run", "saving",
    "sample images", "logging", "command",
)  # fmt: skip

# name, kind (0 after it: a value of 0 means "off"), target, and False where the switch turns its target off
_SETS: Mapping[str, str] = {
    "model": """
        pretrained_model_name_or_path text model.path
        model_config text model.config
        vae text model.vae
        v2 switch model.v2
        clip_skip int model.clip_skip
        max_token_length int model.max_token_length
    """,
    "data": """
        train_data_dir text data.train_data_dir
        reg_data_dir text data.reg_data_dir
        resolution size data.resolution
        train_batch_size int data.batch_size
        caption_extension text data.caption_extension
        caption_extention text data.caption_extension
        caption_separator text data.caption_separator
        shuffle_caption switch data.shuffle_caption
        keep_tokens int data.keep_tokens
        keep_tokens_separator text data.keep_tokens_separator
        caption_prefix text data.caption_prefix
        caption_suffix text data.caption_suffix
        caption_dropout_rate float data.caption_dropout_rate
        caption_dropout_every_n_epochs int data.caption_dropout_every_n_epochs
        caption_tag_dropout_rate float data.caption_tag_dropout_rate
        flip_aug switch data.flip
        random_crop switch data.random_crop
        enable_bucket switch data.enable_bucket
        min_bucket_reso int data.min_bucket_reso
        max_bucket_reso int data.max_bucket_reso
        bucket_reso_steps int data.bucket_reso_steps
        bucket_no_upscale switch data.bucket_no_upscale
        cache_latents switch data.cache_latents
        cache_latents_to_disk switch data.cache_latents_to_disk
        vae_batch_size int data.vae_batch_size
        max_data_loader_n_workers int data.num_workers
        skip_bad_images switch data.skip_bad_images
    """,
    "network": """
        network_module text network.module
        network_dim int network.dim
        network_alpha alpha network.alpha
        network_dropout float network.dropout
        network_args assignments network.arguments
        network_train_unet_only switch network.train_text_encoder False
        network_train_text_encoder_only switch network.train_unet False
        network_weights text network.weights
        dim_from_weights switch network.dim_from_weights
        scale_weight_norms float0 network.scale_weight_norms
    """,
    "optimizer": """
        optimizer_type text optimizer.name
        optimizer_args assignments optimizer.arguments
        learning_rate float optimizer.learning_rate
        unet_lr float optimizer.unet_lr
        text_encoder_lr floats optimizer.text_encoder_lr
        max_grad_norm float run.max_grad_norm
    """,
    "learning-rate schedule": """
        lr_scheduler text schedule.name
        lr_scheduler_type text schedule.type
        lr_scheduler_args assignments schedule.arguments
        lr_warmup_steps steps schedule.warmup
        lr_decay_steps steps schedule.decay
        lr_scheduler_num_cycles int schedule.num_cycles
        lr_scheduler_power float schedule.power
        lr_scheduler_timescale int schedule.timescale
        lr_scheduler_min_lr_ratio float schedule.min_lr_ratio
    """,
    "noise and loss": """
        prior_loss_weight float loss.prior_loss_weight
        v_parameterization switch loss.v_parameterization
        loss_type text loss.loss_type
        huber_schedule text loss.huber_schedule
        huber_c float loss.huber_c
        huber_scale float loss.huber_scale
        min_snr_gamma float0 loss.min_snr_gamma
        debiased_estimation_loss switch loss.debiased_estimation_loss
        scale_v_pred_loss_like_noise_pred switch loss.scale_v_pred_loss_like_noise_pred
        v_pred_like_loss float0 loss.v_pred_like_loss
        noise_offset float0 loss.noise_offset
        noise_offset_random_strength switch loss.noise_offset_random_strength
        adaptive_noise_scale float0 loss.adaptive_noise_scale
        multires_noise_iterations int0 loss.multires_noise_iterations
        multires_noise_discount float loss.multires_noise_discount
        ip_noise_gamma float0 loss.ip_noise_gamma
        ip_noise_gamma_random_strength switch loss.ip_noise_gamma_random_strength
        zero_terminal_snr switch loss.zero_terminal_snr
        min_timestep int loss.min_timestep
        max_timestep int loss.max_timestep
    """,
    "precision": """
        mixed_precision text precision.mixed_precision
        allow_fp16_on_cpu switch precision.allow_fp16_on_cpu
    """,
    "compiling": """
        compile_check text compile.check
        compile_regions text compile.regions
        dynamo_backend text compile.backend
        dynamo_mode text compile.mode
        dynamo_use_dynamic truth compile.dynamic
        dynamo_use_fullgraph truth compile.fullgraph
    """,
    "run": """
        max_train_steps int run.max_train_steps
        max_train_epochs int0 run.max_train_epochs
        gradient_accumulation_steps int run.gradient_accumulation_steps
        gradient_checkpointing switch run.gradient_checkpointing
        seed int run.seed
        resume text run.resume
    """,
    "saving": """
        output_dir text saving.output_dir
        output_name text saving.output_name
        save_precision text saving.save_precision
        save_every_n_epochs int0 saving.save_every_n_epochs
        save_every_n_steps int0 saving.save_every_n_steps
        save_n_epoch_ratio int0 saving.save_n_epoch_ratio
        save_last_n_epochs int0 saving.save_last_n_epochs
        save_last_n_epochs_state int0 saving.save_last_n_epochs_state
        save_last_n_steps int0 saving.save_last_n_steps
        save_last_n_steps_state int0 saving.save_last_n_steps_state
        save_state switch saving.save_state
        save_state_on_train_end switch saving.save_state_on_train_end
        no_metadata switch saving.no_metadata
        training_comment text saving.training_comment
        metadata_title text saving.title
        metadata_author text saving.author
        metadata_description text saving.description
        metadata_license text saving.license
        metadata_tags text saving.tags
    """,
    "sample images": """
        sample_prompts text sampling.prompts
        sample_every_n_steps int0 sampling.every_n_steps
        sample_every_n_epochs int0 sampling.every_n_epochs
        sample_at_first switch sampling.at_first
        sample_sampler text sampling.sampler
    """,
    "logging": """
        logging_dir text logging.logging_dir
        log_prefix text logging.log_prefix
        log_tracker_name text logging.tracker_name
        quiet switch logging.quiet
    """,
}

_READ_BY_THE_PARSER = (
    Flag(name="use_8bit_adam", group="optimizer", kind="switch", meaning="the same as --optimizer_type=AdamW8bit (bitsandbytes)"),
    Flag(name="use_lion_optimizer", group="optimizer", kind="switch", meaning="the same as --optimizer_type=Lion (lion-pytorch)"),
    Flag(name="torch_compile", group="compiling", kind="switch", meaning="compile: with inductor, or what --dynamo_backend says"),
    Flag(name="save_model_as", group="saving", meaning="file format; safetensors is the only one", example="FORMAT"),
    Flag(name="log_with", group="logging", meaning="tracker; tensorboard is the only one, and needs --logging_dir", example="TRACKER"),
    Flag(name="config_file", group="command", meaning="TOML file with the same names; the command line wins", example="FILE"),
    Flag(name="help", group="command", kind="switch", meaning="show this and exit"),
)

_ATTENTION = "attention is computed by torch's scaled_dot_product_attention"
_MEANS: Mapping[str, tuple[str, str, str]] = {  # name -> group, kind, line
    "xformers": ("run", "switch", _ATTENTION),
    "sdpa": ("run", "switch", _ATTENTION),
    "mem_eff_attn": ("run", "switch", _ATTENTION),
    "persistent_data_loader_workers": ("data", "switch", "images are loaded by threads that stay for the whole run"),
    "skip_cache_check": ("data", "switch", "cached latents are always checked: it costs little"),
    "no_half_vae": ("precision", "switch", "the VAE always computes in fp32"),
    "lowram": ("run", "switch", "weights are read straight into their place, one model at a time"),
    "highvram": ("run", "switch", "nothing is moved off the device to save memory"),
    "tokenizer_cache_dir": ("model", "text", "the tokenizer comes with the package or the model folder; nothing is downloaded"),
}

_FLAT = "only a folder of N_words folders is read"
_LATER = "it is not supported yet"
_PLAIN = "leave it out"

# (group, why, what instead) -> flags; ":kind" follows a name that takes no text, "=value" a value that asks for nothing
_REFUSES: Mapping[tuple[str, str, str], str] = {
    ("data", _FLAT, "use --train_data_dir"): "in_json dataset_config dataset_class",
    ("data", _FLAT, "name the folder N_words: N repeats"): "dataset_repeats:int=1",
    ("data", "images are only mirrored and cropped while they are loaded", "use --flip_aug and --random_crop"): """
        color_aug:switch face_crop_aug_range
    """,
    ("data", _LATER, "leave it out: brackets in captions are then read as they stand"): "weighted_captions:switch",
    ("data", _LATER, _PLAIN): """
        secondary_separator enable_wildcard:switch token_warmup_min:int=1 token_warmup_step:float=0
        debug_dataset:switch cache_info:switch resize_interpolation
    """,
    ("data", "masked loss is not supported yet", _PLAIN): "masked_loss:switch alpha_mask:switch conditioning_data_dir",
    (
        "network",
        "merging adapters into the base model before training is not supported yet",
        "merge them into a base model file first, or start from one of them with --network_weights",
    ): "base_weights:texts base_weights_multiplier:floats",
    ("optimizer", "gradients are needed whole for clipping and accumulation", _PLAIN): "fused_backward_pass:switch",
    ("precision", "adapters are always trained in fp32: half precision loses small updates", "use --mixed_precision"): """
        full_fp16:switch full_bf16:switch
    """,
    ("precision", "8-bit frozen weights are not supported yet", "use --mixed_precision"): "fp8_base:switch fp8_base_unet:switch",
    ("run", "moving activations off the device is not supported", "use --gradient_checkpointing"): "cpu_offload_checkpointing:switch",
    ("run", "a run goes on from a state, which knows where it was", "use --resume"): """
        initial_epoch:int initial_step:int skip_until_initial_step:switch
    """,
    ("run", "gradients are averaged in one message, without DDP", _PLAIN): """
        ddp_timeout:int ddp_gradient_as_bucket_view:switch ddp_static_graph:switch
    """,
    ("run", "sharded training by DeepSpeed is not supported", _PLAIN): """
        deepspeed:switch zero_stage:int=2 offload_optimizer_device offload_optimizer_nvme_path offload_param_device
        offload_param_nvme_path zero3_init_flag:switch zero3_save_16bit_model:switch fp16_master_weights_and_gradients:switch
    """,
    ("run", "validation during training is not supported yet", "compare sample images: --sample_prompts"): """
        validation_seed:int validation_split:float=0 validate_every_n_steps:int validate_every_n_epochs:int max_validation_steps:int
    """,
    ("run", "it belongs to full fine-tuning", "use --text_encoder_lr, or --network_train_unet_only"): "stop_text_encoder_training:int=0",
    ("run", "it belongs to SDXL training, which is not supported yet", _PLAIN): """
        cache_text_encoder_outputs:switch cache_text_encoder_outputs_to_disk:switch disable_mmap_load_safetensors:switch
    """,
    ("saving", "the trainer uploads nothing", "upload the result with: hf upload"): """
        huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token huggingface_repo_visibility
        save_state_to_huggingface:switch resume_from_huggingface:switch async_upload:switch
    """,
    ("saving", "this metadata field is not written", "use --training_comment or --metadata_description"): """
        metadata_usage_hint metadata_thumbnail metadata_merged_from metadata_trigger_phrase metadata_preprocessor
        metadata_is_negative_embedding
    """,
    ("saving", "configuration files are not written", "write the file by hand: its keys are the flags' names"): "output_config:switch",
    ("logging", "TensorBoard is the only tracker", "use --logging_dir"): """
        wandb_run_name wandb_api_key log_tracker_config log_config:switch
    """,
    ("logging", _LATER, "use --quiet, or redirect the output"): "console_log_level console_log_file console_log_simple:switch",
    ("command", "it is a flag of accelerate launch", "put it before -m onegraph.train_network"): """
        num_cpu_threads_per_process:int num_processes:int num_machines:int machine_rank:int main_process_port:int main_process_ip
        multi_gpu:switch cpu:switch gpu_ids
    """,
}

_EXAMPLES = {"text": "TEXT", "int": "N", "float": "X", "steps": "N", "size": "W,H", "alpha": "X", "truth": "BOOL", "floats": "X"}


def _sets() -> Iterator[Flag]:
    """The flags that set one setting each."""
    for group, lines in _SETS.items():
        for line in lines.strip().splitlines():
            name, kind, target, *rest = line.split()
            example = _EXAMPLES.get(kind.rstrip("0"), "")
            yield Flag(
                name=name,
                group=group,
                kind=kind.rstrip("0"),
                target=target,
                value=rest != ["False"],
                zero_is_off=kind.endswith("0"),
                meaning="the same as --caption_extension" if name == "caption_extention" else "",
                example=example,
            )


def _refuses() -> Iterator[Flag]:
    """The flags that are known and not supported."""
    for (group, why, instead), names in _REFUSES.items():
        for item in names.split():
            name, _, kind_and_value = item.partition(":")
            kind, _, inert = kind_and_value.partition("=")
            yield Flag(name=name, group=group, kind=kind or "text", refusal=why, instead=instead, inert=(inert,) if inert else ())


def _table() -> dict[str, Flag]:
    """Every flag by its name."""
    means = (Flag(name=name, group=group, kind=kind, note=line) for name, (group, kind, line) in _MEANS.items())
    flags = [*_sets(), *_READ_BY_THE_PARSER, *means, *_refuses()]
    table = {flag.name: flag for flag in flags}
    assert len(table) == len(flags), "a flag stands in the table twice"
    return table


FLAGS: Mapping[str, Flag] = _table()
_BY_TARGET: Mapping[str, str] = {flag.target: flag.name for flag in reversed(list(FLAGS.values())) if flag.target}


def flag_label(path: str) -> str:
    """How a setting is called on the command line: "run.seed" -> "--seed"; a part of --network_args by its own name."""
    if path in _BY_TARGET:
        return f"--{_BY_TARGET[path]}"
    return f"--network_args {path.rpartition('.')[2]}" if path.startswith(("network.", "optimizer.")) else path
