"""What may differ between a state of this trainer and the run that goes on from it."""

from __future__ import annotations

from onegraph.training.state import Freedom

FREEDOM = Freedom(
    branches=frozenset({"saving", "sampling", "logging", "compile", "notes"}),
    settings=frozenset(
        {"run.resume", "run.seed", "model.path", "model.tokenizer", "model.config", "data.train_data_dir", "data.reg_data_dir"}
        | {"data.skip_bad_images", "data.num_workers", "data.cache_latents_to_disk"}
    ),
    length=frozenset({"run.max_train_steps", "run.max_train_epochs"}),
    start_over="start a new run from its weights with --network_weights",
)
