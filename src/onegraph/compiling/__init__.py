"""The only caller of torch.compile: settings, backends, tool chain, regions, and a watch on what was compiled."""

from onegraph.compiling.ahead import compile_ahead
from onegraph.compiling.aside import set_aside
from onegraph.compiling.backends import BACKENDS, resolve_backend
from onegraph.compiling.breaks import BreakPoint, break_mark, breaks_since
from onegraph.compiling.compile import Compiled, compile, compiled_of, eager
from onegraph.compiling.protections import PROTECTIONS, Protection, protections_for
from onegraph.compiling.regions import Region, regions_of
from onegraph.compiling.settings import CompileSettings, LaunchRecord, read_launch, resolve_settings
from onegraph.compiling.toolchain import check_toolchain
from onegraph.compiling.tuning import device_of
from onegraph.compiling.watch import Recompile, Watch

__all__ = [
    "BACKENDS",
    "PROTECTIONS",
    "BreakPoint",
    "CompileSettings",
    "Compiled",
    "LaunchRecord",
    "Protection",
    "Recompile",
    "Region",
    "Watch",
    "break_mark",
    "breaks_since",
    "check_toolchain",
    "compile",
    "compile_ahead",
    "compiled_of",
    "device_of",
    "eager",
    "protections_for",
    "read_launch",
    "regions_of",
    "resolve_backend",
    "resolve_settings",
    "set_aside",
]
