"""The stack machine that reads a pickle without running it, and the table of names it knows.

A pickle is a program, and Python's own machine calls whatever the program names. This one knows a fixed table of names (tensors,
storages, plain containers, numpy scalars) and does itself what they stand for. Classes of known training frameworks become inert
stand-ins. Every other name is noted as refused, and no name is ever imported.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Packages whose objects sit beside the weights of real files; they become stand-ins.
FRAMEWORKS = _names(
    "pytorch_lightning lightning lightning_fabric lightning_utilities lightning_lite torchmetrics omegaconf antlr4 hydra yacs "
    "transformers diffusers accelerate deepspeed apex bitsandbytes ldm sgm taming clip open_clip timm kornia wandb fsspec easydict "
    "addict ml_collections library modelcards huggingface_hub safetensors"
)
# Plain data of the standard library and of torch that old files carry: exact names, stand-ins too.
PLAIN_DATA = _names(
    "argparse.Namespace types.SimpleNamespace pathlib.Path pathlib.PurePath pathlib.PosixPath pathlib.WindowsPath "
    "pathlib.PurePosixPath pathlib.PureWindowsPath pathlib._local.PosixPath pathlib._local.WindowsPath datetime.datetime "
    "datetime.date datetime.timedelta datetime.timezone uuid.UUID decimal.Decimal fractions.Fraction enum.Enum typing.Any typing.Dict "
    "typing.List typing.Union collections.deque collections.Counter builtins.object builtins.dict builtins.list builtins.tuple "
    "builtins.int builtins.float builtins.str builtins.bool builtins.bytes builtins.NoneType builtins.slice builtins.range "
    "builtins.frozenset numpy.ndarray numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct "
    "numpy.random._pickle.__randomstate_ctor torch.torch_version.TorchVersion torch.Generator"
)
FRAMEWORK_MODULES = ("torch.optim.", "torch.cuda.amp.", "torch.amp.", "numpy.dtypes.")
# A name below a framework that reaches through it for one of these is refused all the same.
NEVER = _names(
    "os posix nt sys subprocess builtins __builtin__ importlib ctypes socket shutil runpy pty marshal eval exec system popen getattr "
    "setattr __import__ import_module check_output check_call Popen"
)
# Written so by protocols up to 2, and meant so by whoever reads them.
PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "commands": "subprocess", "cPickle": "pickle"}
DTYPES: dict[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class Global:
    """A name met in the pickle, e.g. ``torch._utils._rebuild_tensor_v2``: text only, nothing is imported for it."""

    name: str


@dataclass(frozen=True)
class StandIn:
    """What a framework object becomes: its name and nothing else."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A storage the pickle points at."""

    dtype: torch.dtype
    key: str
    num_elements: int


@dataclass
class TensorRecipe:
    """A tensor as the pickle describes it, before any storage is read."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class Machine:
    """Interprets one pickle.

    ``refused`` collects the names that would have run, ``skipped`` those left out, ``storages`` the element type of each storage.
    """

    refused: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    storages: dict[str, torch.dtype] = field(default_factory=dict)

    def run(self, stream: BinaryIO) -> Any:
        """The value that the pickle describes, up to its STOP; other values than plain ones are recipes and stand-ins."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}

        def to_mark() -> list[Any]:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            return items

        for opcode, argument, _ in pickletools.genops(stream):
            match opcode.name:
                case "STOP":
                    return stack.pop()
                case "PROTO" | "FRAME":
                    pass
                case "MARK":
                    marks.append(len(stack))
                case "POP":
                    if marks and marks[-1] == len(stack):
                        marks.pop()
                    else:
                        stack.pop()
                case "POP_MARK":
                    to_mark()
                case "DUP":
                    stack.append(stack[-1])
                case "NONE":
                    stack.append(None)
                case "NEWTRUE":
                    stack.append(True)
                case "NEWFALSE":
                    stack.append(False)
                case "EMPTY_TUPLE":
                    stack.append(())
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_SET":
                    stack.append([])
                case "TUPLE":
                    stack.append(tuple(to_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(opcode.name[-1])
                    items = stack[-count:]
                    del stack[-count:]
                    stack.append(tuple(items))
                case "LIST" | "FROZENSET":
                    stack.append(to_mark())
                case "DICT":
                    stack.append(_paired(to_mark()))
                case "APPEND":
                    _extend(stack, [stack.pop()])
                case "APPENDS" | "ADDITEMS":
                    _extend(stack, to_mark())
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    _update(stack, [key, value])
                case "SETITEMS":
                    _update(stack, to_mark())
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(memo[cast(int, argument)])
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[cast(int, argument)] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "GLOBAL":
                    stack.append(self.look_up(*cast(str, argument).split(" ", 1)))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(self.look_up(module, name))
                case "INST":
                    to_mark()
                    stack.append(self.call(self.look_up(*cast(str, argument).split(" ", 1)), ()))
                case "OBJ":
                    called, *arguments = to_mark()
                    stack.append(self.call(called, tuple(arguments)))
                case "REDUCE" | "NEWOBJ":
                    arguments, called = stack.pop(), stack.pop()
                    stack.append(self.call(called, arguments))
                case "NEWOBJ_EX":
                    _, arguments, called = stack.pop(), stack.pop(), stack.pop()
                    stack.append(self.call(called, arguments))
                case "BUILD":
                    # An object's attributes: weights have none, and a stand-in keeps none.
                    stack.pop()
                case "PERSID":
                    stack.append(StandIn("persistent id"))
                case "BINPERSID":
                    stack.append(self.storage(stack.pop()))
                case "EXT1" | "EXT2" | "EXT4":
                    self.refused.append(f"copyreg extension {argument}")
                    stack.append(StandIn("extension"))
                case "NEXT_BUFFER" | "READONLY_BUFFER":
                    raise ValueError("out-of-band buffers")
                case _:
                    # What is left are numbers and strings, which genops has decoded.
                    stack.append(argument)
        raise ValueError("no STOP")

    def look_up(self, module: object, name: object) -> Global | StandIn:
        """The name as data, noting whether it is unknown."""
        if not isinstance(module, str) or not isinstance(name, str):
            # Never written out: a container that holds itself many times over is endless as text.
            raise ValueError(f"a {type(module).__name__} and a {type(name).__name__} are given as a name")
        module = PYTHON_2_MODULES.get(module, module)
        full = f"{module}.{name}"
        if (
            full == REBUILD_SUBCLASS
            or full in CALLS
            or full in REDUCED_BY_NAME
            or _dtype(full) is not None
            or _storage_dtype(full) is not None
        ):
            return Global(full)
        parts = full.split(".")
        known = parts[0] in FRAMEWORKS or full in PLAIN_DATA or full.startswith(FRAMEWORK_MODULES)
        if not known or (parts[0] != "builtins" and NEVER.intersection(parts)):
            self.refused.append(full)
        self.skipped.append(full)
        return StandIn(full)

    def call(self, called: object, arguments: object) -> Any:
        """What calling ``called`` would have given, made here from the table."""
        if isinstance(called, StandIn):
            return called
        if not isinstance(called, Global):
            raise ValueError(f"a {type(called).__name__} is called")
        given = tuple(arguments) if isinstance(arguments, list | tuple) else ()
        if called.name in REDUCED_BY_NAME:
            # copyreg._reconstructor(cls, base, state) and friends: an object of the class in front.
            return given[0] if given and isinstance(given[0], StandIn | Global) else StandIn(called.name)
        if called.name == REBUILD_SUBCLASS and len(given) > 2:
            return self.call(given[0], given[2])
        if called.name in CALLS:
            return CALLS[called.name](*given)
        return StandIn(called.name)

    def storage(self, identity: object) -> Storage | StandIn:
        """The storage a persistent id ``("storage", type, key, location, count, ...)`` names."""
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            return StandIn("persistent id")
        _, kind, key, _, count = identity[:5]
        dtype = _storage_dtype(kind.name) if isinstance(kind, Global) else None
        if dtype is None:
            raise ValueError(f"a storage of the unknown type {getattr(kind, 'name', type(kind).__name__)}")
        if not isinstance(key, str | int):
            raise ValueError(f"a storage named by a {type(key).__name__}")
        if len(identity) > 5 and identity[5] is not None:
            raise ValueError("a storage that is a view of another, as torch before 0.4 wrote")
        self.storages[str(key)] = dtype
        return Storage(dtype, str(key), int(count))


def _paired(items: Sequence[Any]) -> dict[Any, Any]:
    """Alternating keys and values as a dict; a key that can't be one is left out."""
    return {key: value for key, value in zip(items[::2], items[1::2], strict=True) if _hashable(key)}


def _hashable(key: object) -> bool:
    """Whether a value can be a key: a plain one, or a flat tuple of plain ones (tuples of tuples could take for ever to hash)."""
    return _plain(key) or (isinstance(key, tuple) and all(map(_plain, key)))


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bytes | StandIn | Global | None)


def _extend(stack: list[Any], items: list[Any]) -> None:
    """Append to the list on top; a stand-in takes anything and keeps nothing."""
    if isinstance(stack[-1], list):
        stack[-1].extend(items)


def _update(stack: list[Any], items: list[Any]) -> None:
    """Put pairs in the dict on top; a stand-in takes anything and keeps nothing."""
    if isinstance(stack[-1], dict):
        stack[-1].update(_paired(items))


def _dtype(full: str) -> torch.dtype | None:
    found = getattr(torch, full.removeprefix("torch."), None) if full.startswith("torch.") and full.count(".") == 1 else None
    return found if isinstance(found, torch.dtype) else None


def _storage_dtype(full: str) -> torch.dtype | None:
    """The element type of ``torch.FloatStorage``, ``torch.cuda.HalfStorage``, ``torch.storage.UntypedStorage``."""
    module, _, name = full.rpartition(".")
    return DTYPES.get(name) if module in ("torch", "torch.cuda", "torch.storage") else None


def _rebuild_tensor(storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object) -> TensorRecipe | StandIn:
    if not isinstance(storage, Storage):
        return StandIn("tensor")
    return TensorRecipe(storage, int(offset), tuple(int(n) for n in size), tuple(int(n) for n in stride))


def _rebuild_parameter(data: object = None, *_: object) -> object:
    return data


def _rebuild_typed(storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *rest: object) -> object:
    """A tensor over an untyped storage, its element type apart: behind grad and hooks."""
    dtype = rest[2]
    found = _dtype(dtype.name) if isinstance(dtype, Global) else None
    if not isinstance(storage, Storage) or found is None:
        return StandIn("tensor")
    return _rebuild_tensor(Storage(found, storage.key, storage.num_elements // found.itemsize), offset, size, stride)


def _container(items: Sequence[Any] = (), *_: object) -> dict[Any, Any]:
    """OrderedDict(), and OrderedDict([[key, value], ...]) as protocol 0 and 1 write it."""
    return {pair[0]: pair[1] for pair in items if isinstance(pair, list | tuple) and len(pair) == 2 and _hashable(pair[0])}


def _empty(*_: object) -> dict[Any, Any]:
    return {}


def _items(items: Sequence[Any] = (), *_: object) -> list[Any]:
    return list(items)


def _encode(text: object = "", *_: object) -> bytes:
    return text.encode("latin-1", "replace") if isinstance(text, str) else b""


# Every name that does anything, and what it does: nothing here is reached by importing.
CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _container,
    "collections.defaultdict": _empty,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_typed,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch.nn.parameter.Parameter": _rebuild_parameter,
    "torch.Size": _items,
    "builtins.set": _items,
    "builtins.bytearray": _items,
    "_codecs.encode": _encode,
}
# A tensor subclass, e.g. a Buffer: the function that rebuilds the tensor, the class, its arguments.
REBUILD_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
# Data that carries no weights: numpy scalars, devices, dtypes, complex numbers.
REDUCED_BY_NAME = _names(
    "numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.dtype torch.device torch.serialization._get_layout "
    "builtins.complex copyreg._reconstructor copyreg.__newobj__ torch.Tensor torch.storage.TypedStorage"
)
