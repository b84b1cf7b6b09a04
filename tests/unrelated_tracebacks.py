"""Errors that have nothing to do with the catalogue, as people paste them: none of them may be explained."""

from __future__ import annotations


def traceback(*frames: str, error: str) -> str:
    """A traceback of frames given as "file:function"."""
    places = [f'  File "{file}", line 10, in {function}' for file, _, function in (frame.partition(":") for frame in frames)]
    return "\n".join(["Traceback (most recent call last):", *places, error]) + "\n"


UNRELATED = {
    "zero-division": traceback("train.py:<module>", error="ZeroDivisionError: division by zero"),
    "key-error": traceback("train.py:<module>", "data.py:__getitem__", error="KeyError: 'caption'"),
    "attribute-of-none": traceback("train.py:main", error="AttributeError: 'NoneType' object has no attribute 'shape'"),
    "attribute-of-function": traceback("train.py:main", error="AttributeError: 'function' object has no attribute 'items'"),
    "module-missing": traceback("train.py:<module>", error="ModuleNotFoundError: No module named 'wandb'"),
    "import-name": traceback("train.py:<module>", error="ImportError: cannot import name 'cached_download' from 'huggingface_hub'"),
    "file-missing": traceback("train.py:main", error="FileNotFoundError: [Errno 2] No such file or directory: 'data/meta.json'"),
    "permission": traceback("train.py:main", error="PermissionError: [Errno 13] Permission denied: 'out/model.safetensors'"),
    "json": traceback("json/decoder.py:raw_decode", error="json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    "unicode": traceback("codecs.py:decode", error="UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0"),
    "recursion": traceback("tree.py:walk", "tree.py:walk", error="RecursionError: maximum recursion depth exceeded"),
    "memory": traceback("numpy/core.py:zeros", error="numpy._core._exceptions._ArrayMemoryError: Unable to allocate 64.0 GiB for an array"),
    "keyboard": traceback("train.py:main", "torch/autograd/graph.py:_engine_run_backward", error="KeyboardInterrupt"),
    "type-error": traceback("train.py:main", error="TypeError: forward() got an unexpected keyword argument 'attention_mask'"),
    "cuda-memory": traceback(
        "torch/nn/modules/linear.py:forward",
        error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB",
    ),
    "device-assert": traceback(
        "train.py:main",
        error="RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
    ),
    "no-driver": traceback("torch/cuda/__init__.py:_lazy_init", error="RuntimeError: Found no NVIDIA driver on your system."),
    "devices": traceback(
        "torch/nn/functional.py:linear",
        error="RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ),
    "shapes": traceback(
        "torch/nn/modules/linear.py:forward", error="RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"
    ),
    "broadcast": traceback(
        "model.py:forward", error="RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1"
    ),
    "dtypes": traceback("model.py:forward", error="RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != float"),
    "no-grad": traceback(
        "torch/_tensor.py:backward",
        error="RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    ),
    "twice-backward": traceback(
        "torch/_tensor.py:backward",
        error="RuntimeError: Trying to backward through the graph a second time.",
    ),
    "in-place": traceback(
        "torch/_tensor.py:backward",
        error="RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
    ),
    "state-dict-shapes": traceback(
        "torch/nn/modules/module.py:load_state_dict",
        error="RuntimeError: Error(s) in loading state_dict for UNet:\n\tsize mismatch for conv_in.weight: torch.Size([8])",
    ),
    "state-dict-names": traceback(
        "torch/nn/modules/module.py:load_state_dict",
        error='RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "module.0.weight".',
    ),
    "checkpoint-pickle": traceback(
        "torch/serialization.py:load",
        error="_pickle.UnpicklingError: Weights only load failed. Use `weights_only=False` where you trust it.",
    ),
    "hub-404": traceback(
        "huggingface_hub/utils/_http.py:hf_raise_for_status",
        error="huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. Repository Not Found",
    ),
    "tokenizer": traceback(
        "transformers/tokenization_utils_base.py:pad",
        error="ValueError: Asking to pad but the tokenizer does not have a padding token.",
    ),
    "config-class": traceback(
        "transformers/models/auto/auto_factory.py:from_pretrained",
        error="ValueError: Unrecognized configuration class <class 'X'> for this kind of AutoModel: AutoModelForCausalLM.",
    ),
    "accelerate-state": traceback(
        "accelerate/state.py:__init__",
        error="ValueError: You can't train a model that has been loaded in 8-bit precision on a different device.",
    ),
    "nccl": traceback(
        "torch/distributed/c10d_logger.py:wrapper",
        error="torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error",
    ),
    "other-graph-break": traceback(
        "torch/_dynamo/eval_frame.py:compile_wrapper",
        error=(
            "torch._dynamo.exc.Unsupported: Unsupported context manager\n  Explanation: Dynamo does not know a `Lock`.\n"
            "\n For more details about this graph break, please visit: https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0142.html"
        ),
    ),
    "other-compiler-error": traceback(
        "torch/_inductor/graph.py:run_node",
        error="torch._inductor.exc.InductorError: AssertionError: could not find an algorithm for this convolution",
    ),
    "gcc": "main.cpp:3:10: fatal error: opencv2/core.hpp: No such file or directory\ncompilation terminated.\n",
    "log": "2026-11-30 12:00:00 INFO step 10 loss 0.12\n2026-11-30 12:00:01 INFO step 11 loss 0.11\n",
    "toml": '[compile]\nbackend = "inductor"\n\n[data]\nfolder = "images"\n',
    "nothing": "\n",
}
