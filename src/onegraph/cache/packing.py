"""The folder as one file, for another machine of the same kind.

torch's own ``save_cache_artifacts`` holds the graphs of the process that calls it, not the C++ kernels: on a CPU a second machine would
build each of them again. So the folder itself is packed.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import onegraph
from onegraph.cache.entries import Entry, entries, require_readable, travels
from onegraph.cache.kind import machine_kind
from onegraph.checkpoint.atomic import atomic_write, check_writable
from onegraph.doctor.cache_folder import location
from onegraph.errors import CompileError

FORMAT = 1
MANIFEST = "onegraph-cache.json"
FILES = "files/"


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What ``pack`` wrote.

    Args:
        path: The file.
        folder: The folder that it holds.
        files: Number of files in it.
        graphs: Of them, graphs.
        kernels: Of them, built C++ kernels.
        bytes: Their size, before compression.
        packed_bytes: The file's size.
    """

    path: str
    folder: str
    files: int
    graphs: int
    kernels: int
    bytes: int
    packed_bytes: int


def pack(path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> Packed:
    """Writes the cache folder as one zip file, with a manifest that says which machine it is good for.

    Locks, files cut off and what isn't inductor's are left out. A run that compiles meanwhile does no harm.

    Args:
        path: The file to write; whole or not at all.
        folder: The cache folder; the one inductor would use when None.

    Raises:
        CompileError: ``cache-empty``: there is nothing to pack; ``cache-folder``: something in it that can't be read.
        OutputError: The file can't be written.
    """
    path = Path(path)
    cache = Path(folder) if folder is not None else location()[0]
    check_writable(path)
    present = list(entries(cache, strict=True)) if cache.is_dir() else []
    for entry in present:
        require_readable(entry)
    found = [entry for entry in present if travels(entry)]
    _require_graphs(cache, found, "Nothing has been compiled with inductor into it." if cache.is_dir() else "The folder isn't there.")
    machine = machine_kind().record()
    written: list[Entry] = []

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for entry in found:
                try:
                    content = entry.path.read_bytes()
                except FileNotFoundError:
                    continue  # cleared meanwhile
                archive.writestr(FILES + entry.name, content)
                written.append(entry)
            _require_graphs(cache, written, "Another process cleared it meanwhile. Nothing was written.")
            manifest = {
                "format": FORMAT,
                "onegraph": onegraph.__version__,
                "packed": time.time(),
                "machine": machine,
                "files": len(written),
                "graphs": sum(entry.is_graph for entry in written),
                "kernels": sum(entry.is_library for entry in written),
                "bytes": sum(archive.getinfo(FILES + entry.name).file_size for entry in written),
            }
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))

    atomic_write(path, write)
    return Packed(
        path=str(path),
        folder=str(cache),
        files=len(written),
        graphs=sum(entry.is_graph for entry in written),
        kernels=sum(entry.is_library for entry in written),
        bytes=sum(entry.bytes for entry in written),
        packed_bytes=path.stat().st_size,
    )


def _require_graphs(cache: Path, found: list[Entry], why: str) -> None:
    if not any(entry.is_graph for entry in found):
        raise CompileError(
            f"There are no graphs in inductor's cache folder {cache}.",
            why=why,
            hint="Run one compiled step first, or name the folder: export TORCHINDUCTOR_CACHE_DIR=FOLDER",
            code="cache-empty",
        )
