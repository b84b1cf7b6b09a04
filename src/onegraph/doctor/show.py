"""The report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onegraph import explain
from onegraph.doctor.finding import BREAKS, NOTE, WARNING, Finding
from onegraph.doctor.report import Report

_MARKS = {BREAKS: "breaks", WARNING: "warning", NOTE: "note"}
_WIDTH = 116


def text(report: Report) -> str:
    """The whole report; what to do comes last."""
    parts = [
        ("Python and packages", _packages(report)),
        ("Machine", _machine(report)),
        ("Inductor's cache folder", _cache(report)),
        ("What would be compiled", _settings(report)),
        ("Backends", _backends(report)),
        ("Known faults of these versions", _pairs(report.pairs)),
        ("What to do", _advice(report.findings)),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Two columns; long words go on in the second."""
    pairs = [(name, value) for name, value in rows if name or value]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        lines = textwrap.wrap(value, _WIDTH - width, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{name:<{width}}  {lines[0]}".rstrip()
        yield from (f"{'':<{width}}  {line}" for line in lines[1:])


def _packages(report: Report) -> Iterator[str]:
    python = report.python
    rows = [("Python", f"{python['version']}  {python['executable']}{'  (free-threaded)' if python['free_threaded'] else ''}")]
    for package in report.packages:
        wanted = f"  (wanted {package.wanted})" if package.wanted else ""
        rows.append((package.name, f"{package.version or 'not installed'}{wanted}"))
    if "error" in report.torch:
        rows.append(("import torch", str(report.torch["error"])))
    yield from _rows(rows)


def _machine(report: Report) -> Iterator[str]:
    compiler, processor, gpu = report.compiler, report.processor, report.gpu
    called = " ".join((compiler.program, *compiler.flags)) or "none"
    tried = "builds and loads a library with Python.h and OpenMP" if compiler.builds else compiler.problem.strip().replace("\n", " ")
    yield from _rows(
        [
            ("platform", str(report.python["platform"])),
            ("C++ compiler", "  ".join(filter(None, (called, compiler.origin and f"({compiler.origin})", compiler.version)))),
            ("", tried),
            ("Python.h", compiler.python_header or "not found"),
            ("OpenMP", "not found" if compiler.openmp_threads is None else f"found, {compiler.openmp_threads} threads"),
            ("OMP_NUM_THREADS", f"{processor.omp_num_threads or 'not set'}{_launch_threads(processor.launch_threads)}"),
            ("processor", f"{processor.model} ({processor.architecture}), {_cores(report)}, {_bytes(processor.memory_bytes)} of memory"),
            (
                "",
                _features(processor.features) + (f"; torch uses {processor.torch_uses}" if processor.torch_uses else ""),
            ),
            ("GPU", _gpu(gpu.devices or gpu.torch_devices) or gpu.problem or "none found"),
            ("", f"driver {gpu.driver}, torch is built for {gpu.torch_build or 'unknown'}" if gpu.driver else ""),
        ]
    )


def _launch_threads(threads: int | None) -> str:
    return "" if threads is None else f"; accelerate launch sets it to {threads}"


def _features(features: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in features.items())


def _cores(report: Report) -> str:
    processor = report.processor
    limit = "" if processor.quota_cores is None else f", the container's limit is {processor.quota_cores:g}"
    return f"{processor.usable_cores} of {processor.cores} cores usable{limit}"


def _gpu(devices: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{one['name']}, capability {one['capability']}, {_bytes(one['memory_bytes'])}" for one in devices)


def _cache(report: Report) -> Iterator[str]:
    cache = report.cache
    yield from _rows(
        [
            ("path", f"{cache.path}  ({cache.origin})"),
            ("writable", "yes" if cache.writable else f"no: {cache.problem}"),
            (
                "in it",
                f"{cache.entries} graphs, {cache.libraries} compiled libraries, {_bytes(cache.bytes)} in {cache.files} files"
                if cache.exists
                else "it isn't there yet",
            ),
            ("age", f"{_age(cache.newest_seconds)} to {_age(cache.oldest_seconds)}" if cache.oldest_seconds is not None else "-"),
            ("of no use", f"{cache.stale} written by another torch, {cache.unreadable} unreadable"),
            ("disk", f"{_bytes(cache.free_bytes)} free"),
        ]
    )


def _settings(report: Report) -> Iterator[str]:
    file = report.config_file
    state = "read" if file.parsed else file.problem or "there is none: accelerate takes its defaults"
    yield from _rows([("file", f"{file.path}  ({file.origin}): {state}")])
    for name, told in (file.fields or {}).items():
        yield f"  {name}: {told['value']}  ->  {told['effect'] or 'no effect'}"
    for name, told in report.switches.items():
        yield f"{name}={told['value']}: {told['effect'] or 'no effect'}"
    for way in report.ways:
        yield ""
        yield way.command
        if way.problem:
            yield from (f"  {line}" for line in _rows([("stops", way.problem.replace("\n", " "))]))
        rows = []
        for name, row in way.settings.items():
            beaten = "; ".join(f"not {one['value']} ({one['origin']}): {one['why']}" for one in row["overrules"])
            rows.append((name, f"{row['value']}  ({row['origin']}){f'  {beaten}' if beaten else ''}"))
        yield from (f"  {line}" for line in _rows(rows))
        yield from (f"  {line}" for line in _rows(("note", note) for note in way.notes))
    if not report.ways:
        yield "nothing: torch can't be asked"


def _backends(report: Report) -> Iterator[str]:
    if not report.backends:
        yield "not tried: torch can't be asked"
        return
    width = max(len(backend.name) for backend in report.backends)
    for backend in report.backends:
        needs = f"needs {backend.needs}" if backend.needs else backend.standing
        renamed = f"renamed to {backend.runs_as}" if backend.runs_as not in ("", backend.name) else ""
        standing = f"{renamed}, {needs}" if renamed and backend.needs else renamed or needs
        yield f"{backend.name:<{width}}  {standing}{f': {backend.said}' if backend.said else ''}"


def _pairs(pairs: Iterable[Finding]) -> Iterator[str]:
    lines = list(_rows((pair.code, pair.what) for pair in pairs))
    yield from lines or ["none known"]


def _advice(findings: Iterable[Finding]) -> Iterator[str]:
    number = 0
    for finding in findings:
        if not finding.do:
            continue
        number += 1
        lines = textwrap.wrap(
            f"{number}. {_MARKS[finding.severity]}: {finding.what}", _WIDTH, break_long_words=False, break_on_hyphens=False
        )
        yield from lines
        yield from (f"     {'$' if index == 0 else 'or'} {command}" for index, command in enumerate(finding.do))
        if explain.find(finding.code):
            yield f"     why: onegraph explain {finding.code}"
    if number == 0:
        yield "nothing"


def _bytes(number: int | None) -> str:
    if number is None:
        return "unknown"
    value, units = float(number), iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 1024 and unit != "TB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.1f} {unit}"


def _age(seconds: int | None) -> str:
    for limit, size, unit in ((120, 1, "seconds"), (7200, 60, "minutes"), (172800, 3600, "hours")):
        if seconds is not None and seconds < limit:
            return f"{seconds // size} {unit}"
    return f"{(seconds or 0) // 86400} days"
