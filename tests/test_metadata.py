"""The metadata of a network file: the keys of the field, as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from onegraph.training.diffusion.buckets import BucketReport
from onegraph.training.diffusion.configuration import (
    DataSettings,
    LossSettings,
    ModelSettings,
    NetworkSettings,
    OptimizerSettings,
    SavingSettings,
    TrainingConfiguration,
)
from onegraph.training.diffusion.metadata import ALWAYS, FolderFacts, RunFacts, tag_frequency, training_metadata

CONFIGURATION = TrainingConfiguration(
    model=ModelSettings(path="models/base.ckpt", clip_skip=2),
    data=DataSettings(resolution=(512, 448), batch_size=2),
    network=NetworkSettings(dim=8, alpha=4.0, arguments=("conv_dim=4", "conv_alpha=1")),
    optimizer=OptimizerSettings(unet_lr=2e-4),
    saving=SavingSettings(output_dir="out", output_name="cat", author="someone"),
)
FACTS = RunFacts(
    configuration=CONFIGURATION,
    session_id="42",
    started_at=1.5,
    seed=7,
    mixed_precision="bf16",
    base_model_version="sd_v1",
    base_model_name="base.ckpt",
    base_model_hash="cafe0123",
    base_model_sha256="00" * 32,
    prediction_type="epsilon",
    optimizer="bitsandbytes.optim.AdamW8bit(weight_decay=0.1)",
    schedule="constant",
    num_steps=100,
    num_epochs=5,
    num_batches_per_epoch=20,
    folders=[
        FolderFacts(name="10_cat", num_repeats=10, num_images=3, captions=["Red, cat", "cat , dog,", "bird"]),
        FolderFacts(name="1_animal", num_repeats=1, num_images=4, regularisation=True),
    ],
)


def test_values_are_those_of_the_run() -> None:
    metadata = training_metadata(FACTS, steps=40, epoch=2, now=1000.0)
    assert all(isinstance(value, str) for value in metadata.values())
    expected = {
        "ss_v2": "False",
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "8",
        "ss_network_alpha": "4.0",
        "ss_output_name": "cat",
        "ss_sd_model_name": "base.ckpt",
        "ss_sd_model_hash": "cafe0123",
        "ss_resolution": "(512, 448)",
        "ss_clip_skip": "2",
        "ss_num_train_images": "30",
        "ss_num_reg_images": "4",
        "ss_steps": "40",
        "ss_epoch": "2",
        "ss_seed": "7",
        "ss_mixed_precision": "bf16",
        "ss_learning_rate": "0.0001",
        "ss_unet_lr": "0.0002",
        "ss_text_encoder_lr": "None",
        "ss_optimizer": "bitsandbytes.optim.AdamW8bit(weight_decay=0.1)",
        "ss_training_started_at": "1.5",
        "ss_training_finished_at": "1000.0",
        "ss_bucket_info": "null",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "cat",
        "modelspec.resolution": "512x448",
        "modelspec.date": "1970-01-01T00:16:40",
        "modelspec.prediction_type": "epsilon",
        "modelspec.encoder_layer": "2",
        "modelspec.author": "someone",
    }
    assert {key: metadata.get(key) for key in expected} == expected
    assert json.loads(metadata["ss_network_args"]) == {"conv_dim": "4", "conv_alpha": "1"}
    assert json.loads(metadata["ss_dataset_dirs"]) == {"10_cat": {"n_repeats": 10, "img_count": 3}}
    assert json.loads(metadata["ss_reg_dataset_dirs"]) == {"1_animal": {"n_repeats": 1, "img_count": 4}}
    assert json.loads(metadata["ss_tag_frequency"]) == {"10_cat": {"red": 1, "cat": 2, "dog": 1, "bird": 1}}


def test_names_that_are_no_utf8_can_be_stored() -> None:
    saving = replace(CONFIGURATION.saving, output_name="gr\udcf6\udcdfe")
    facts = replace(FACTS, configuration=replace(CONFIGURATION, saving=saving), base_model_name="\udcff.ckpt")
    metadata = training_metadata(facts, steps=1, epoch=1, now=0.0)
    for value in metadata.values():
        value.encode()
    assert metadata["ss_output_name"] == r"gr\udcf6\udcdfe"


def test_no_metadata_keeps_what_readers_need() -> None:
    configuration = replace(CONFIGURATION, saving=replace(CONFIGURATION.saving, no_metadata=True))
    metadata = training_metadata(replace(FACTS, configuration=configuration), steps=1, epoch=1, now=0.0)
    assert set(metadata) == set(ALWAYS)


@pytest.mark.parametrize(
    ("version", "prediction", "architecture", "v2"),
    [
        ("sd_v1", "epsilon", "stable-diffusion-v1/lora", "False"),
        ("sd_v2", "epsilon", "stable-diffusion-v2-512/lora", "True"),
        ("sd_v2_v", "v_prediction", "stable-diffusion-v2-768-v/lora", "True"),
    ],
)
def test_families(version: str, prediction: str, architecture: str, v2: str) -> None:
    metadata = training_metadata(replace(FACTS, base_model_version=version, prediction_type=prediction), steps=1, epoch=1, now=0.0)
    assert metadata["modelspec.architecture"] == architecture
    assert metadata["ss_v2"] == v2
    assert metadata["modelspec.prediction_type"] == ("v" if prediction == "v_prediction" else "epsilon")


def test_buckets_and_timesteps() -> None:
    configuration = replace(CONFIGURATION, loss=LossSettings(max_timestep=500))
    info = BucketReport({(448, 512): 24, (512, 448): 6}, 0.25).metadata()
    metadata = training_metadata(replace(FACTS, configuration=configuration, bucket_info=info), steps=1, epoch=1, now=0.0)
    assert json.loads(metadata["ss_bucket_info"]) == {
        "buckets": {"0": {"resolution": [448, 512], "count": 24}, "1": {"resolution": [512, 448], "count": 6}},
        "mean_img_ar_error": 0.25,
    }
    assert metadata["modelspec.timestep_range"] == "0,500"


def test_tags_are_counted_in_lower_case_without_blanks() -> None:
    assert tag_frequency(["A, b", " a ,,c"]) == {"a": 2, "b": 1, "c": 1}
