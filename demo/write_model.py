"""A model as one file: a diffusers folder (or any base model) as `.safetensors` with original keys, or a `.safetensors` as `.ckpt`.

python demo/write_model.py FOLDER model.safetensors
python demo/write_model.py model.safetensors model.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from onegraph.training.diffusion.base_model import load_base_model
from onegraph.training.diffusion.single_file import save_checkpoint, save_single_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a diffusers folder or a file")
    parser.add_argument("target", type=Path, help="a .safetensors or .ckpt file to write")
    parser.add_argument("--title", default="", help="goes into the metadata of a .safetensors")
    parser.add_argument("--license", default="", help="goes into the metadata of a .safetensors")
    arguments = parser.parse_args()
    if arguments.target.suffix == ".ckpt":
        save_checkpoint(arguments.source, arguments.target, beside={"global_step": 0, "epoch": 0})
    else:
        metadata = {"modelspec.title": arguments.title, "modelspec.license": arguments.license}
        kept = {name: value for name, value in metadata.items() if value}
        save_single_file(load_base_model(arguments.source), arguments.target, dtype=torch.float16, metadata=kept)
    print(f"{arguments.target}: {arguments.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
