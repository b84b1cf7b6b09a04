"""The C++ kernels of a graph compiled as one file.

On a CPU inductor writes each fused loop to a file of its own and starts the C++ compiler for it. Nearly all of the time goes into reading
the headers, so that a graph of twelve loops takes twelve times as long as one file with all of them (``docs/results/methods.md``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import clear_on_fresh_cache

from onegraph.compiling.partition import OPTION, LeanPartitioner

# Kernels in a file: what two files cost more than one is then little, and a machine with many cores has several to compile at once.
# A fixed number, so that a process with one core finds the files of a process with many.
_TOGETHER = 16
_PENDING = "_onegraph_pending"
# All of a file but what it begins with; anything else in it, such as a template with functions of its own, stays a file by itself.
_PLAIN = re.compile(r'\s*#include <torch/csrc/inductor/cpp_prefix\.h>\s*extern "C"\s+void\s+kernel(?=\()')
_DIRECTIVE = re.compile(r"^\s*#(?:include .*|define PY_SSIZE_T_CLEAN)$", re.MULTILINE)


@dataclass(eq=False)
class _Kernel:
    """A kernel that waits for its file to be complete, and its function once it is there."""

    argument_types: Sequence[str]
    source: str
    function: Callable[..., Any] | None = None


class _Library:
    """A compiled file, which holds a Python module a kernel."""

    key: str

    def __init__(self, path: str) -> None:
        self.path = path
        self._functions: dict[int, Callable[..., Any]] = {}

    def function(self, number: int) -> Callable[..., Any]:
        """A kernel, called with tensors and numbers."""
        if number not in self._functions:
            self._functions[number] = self._loaded(_entry(number))
        return self._functions[number]

    def _loaded(self, name: str) -> Callable[..., Any]:
        loader = ExtensionFileLoader(f"onegraph_kernels_{self.key}.{name}", self.path)
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
        return function


@clear_on_fresh_cache
class _Libraries(CppPythonBindingsCodeCache):
    """torch's own cache of compiled files, with several kernels in each."""

    cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012 - torch declares it so

    @staticmethod
    def cache_clear() -> None:
        _Libraries.cache.clear()

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        # where a kernel's bindings find the function that gives a tensor's address
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
        return _Library(path)

    @classmethod
    def start(cls, kernels: Sequence[_Kernel], submit: Callable[..., Any] | None) -> Callable[[], _Library]:
        """Begins to compile one file; the function returned waits for it."""
        found: Callable[[], _Library] = cls.load_async(_file_of(cls, kernels), "cpu", submit_fn=submit)
        return found


@functools.cache
def join_kernels() -> None:
    """Makes inductor compile the kernels of our graphs together; other graphs in the process are compiled as before.

    Inductor has no option for it. Our graphs are those with our partitioner, which is part of the cache key.
    """
    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if not isinstance(getattr(torch._inductor.config, OPTION, None), LeanPartitioner) or not _is_plain(source_code):
            return alone(self, argtypes, source_code)
        kernel = _Kernel(argtypes, source_code)
        self.__dict__.setdefault(_PENDING, []).append(kernel)
        return kernel

    def wait_for_all(self: AsyncCompile, scope: dict[str, Any]) -> None:
        pending = self.__dict__.pop(_PENDING, ())
        _compile(pending, self)
        for name, value in list(scope.items()):
            if isinstance(value, _Kernel):
                scope[name] = value.function if value.function is not None else alone(self, list(value.argument_types), value.source)
        wait(self, scope)

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    AsyncCompile.wait = wait_for_all  # type: ignore[method-assign]


def _compile(kernels: Sequence[_Kernel], pool: AsyncCompile) -> None:
    """Gives kernels their functions. One that is alone in its file is left to torch, and so are those of a file that fails."""
    submit = pool.submit if get_compile_threads() > 1 else None
    started: list[tuple[Sequence[_Kernel], Callable[[], _Library]]] = []
    for start in range(0, len(kernels), _TOGETHER):
        file = kernels[start : start + _TOGETHER]
        if len(file) > 1:
            with contextlib.suppress(Exception):  # whatever it is: torch, compiling each by itself, raises what has to be raised
                started.append((file, _Libraries.start(file, submit)))
    for file, library in started:
        with contextlib.suppress(Exception):
            functions = [library().function(number) for number in range(len(file))]
            for kernel, function in zip(file, functions):
                kernel.function = function


def _is_plain(source: str) -> bool:
    """Whether the file is one function and nothing else."""
    return _PLAIN.match(source) is not None and len(re.findall(r"\bkernel\b", source)) == 1


def _entry(number: int) -> str:
    return f"kernel_{number}"


def _file_of(cache: type[CppPythonBindingsCodeCache], kernels: Iterable[_Kernel]) -> str:
    """One file: each kernel with torch's Python bindings for it, in a namespace of its own."""
    parts: list[str] = []
    directives: dict[str, None] = {"#include <torch/csrc/inductor/cpp_prefix.h>": None}
    for number, kernel in enumerate(kernels):
        name = _entry(number)
        code = _PLAIN.sub(f'extern "C" void {name}', kernel.source, count=1)
        arguments = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {place})" for place, kind in enumerate(kernel.argument_types))
        bindings = cache.suffix_template.format(
            arg_len=len(kernel.argument_types),
            call_entry_func=f"{name}({arguments}); Py_RETURN_NONE;",
            entry_func=name,
            extra_parse_arg="",
        )
        directives.update(dict.fromkeys(line.strip() for line in _DIRECTIVE.findall(bindings)))
        parts.append(f"namespace onegraph_{name} {{\n{code}\n{_DIRECTIVE.sub('', bindings)}\n}}")
    return "\n".join([*directives, *parts, ""])
