"""Every backend name that an old configuration may hold: runs, is mapped with a line, or is an error with the way out."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils.dataclasses import DynamoBackend

from onegraph.compiling import BACKENDS, resolve_backend
from onegraph.errors import CompileError

GONE = ["nvfuser", "aot_nvfuser", "aot_ts_nvfuser", "nvprims_nvfuser", "ofi", "fx2trt", "onnxrt"]
NEEDS_PACKAGE = ["ipex", "tensorrt", "torch_tensorrt", "tvm", "openvino", "openxla", "torchxla_trace_once", "aot_torchxla_trace_once"]


@pytest.mark.parametrize("name", ["inductor", "INDUCTOR", " Inductor ", "eager", "aot_eager", "no", ""])
def test_name_runs(name: str) -> None:
    runs_as, options, _ = resolve_backend(name)
    assert runs_as == (name.strip().lower() or "no")
    assert options == {}


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_debug_backend_says_so(name: str) -> None:
    assert "debugging" in resolve_backend(name)[2]


@pytest.mark.parametrize("name", GONE)
def test_gone_backend_is_an_error_that_offers_inductor(name: str) -> None:
    with pytest.raises(CompileError) as caught:
        resolve_backend(name.upper(), source="file config.yaml")
    assert caught.value.code == "backend-gone"
    assert name.upper() in str(caught.value)
    assert "file config.yaml" in str(caught.value)
    assert "INDUCTOR" in caught.value.hint


@pytest.mark.parametrize("name", NEEDS_PACKAGE)
def test_backend_of_a_missing_package_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(CompileError) as caught:
        resolve_backend(name)
    assert caught.value.code == "backend-needs-package"
    assert BACKENDS[name].needs_module in str(caught.value)


def test_installed_package_that_fails_to_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    with pytest.raises(CompileError, match="importing openvino failed"):
        resolve_backend("openvino")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the error without CUDA")
@pytest.mark.parametrize("name", ["cudagraphs", "aot_cudagraphs"])
def test_cudagraphs_needs_cuda(name: str) -> None:
    with pytest.raises(CompileError) as caught:
        resolve_backend(name)
    assert caught.value.code == "backend-needs-cuda"


def test_aot_cudagraphs_is_mapped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runs_as, _, line = resolve_backend("aot_cudagraphs")
    assert runs_as == "cudagraphs"
    assert "cudagraphs" in line


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(CompileError) as caught:
        resolve_backend("inducter")
    assert caught.value.code == "backend-unknown"
    assert "did you mean inductor? " in caught.value.hint  # once, though torch and our table both have the name


def test_backend_registered_by_someone_else_runs() -> None:
    runs_as, _, line = resolve_backend("eager_noexcept")
    assert runs_as == "eager_noexcept"
    assert "never been tried" in line


def test_every_name_of_accelerates_menu_is_in_the_table() -> None:
    assert {backend.value.lower() for backend in DynamoBackend} <= set(BACKENDS)


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.runs_as in {"inductor", "eager", "aot_eager"}])
def test_running_names_are_known_to_torch(name: str) -> None:
    assert BACKENDS[name].runs_as in torch.compiler.list_backends(None)  # type: ignore[arg-type]
