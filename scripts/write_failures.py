"""Writes docs/failures/ from the catalogue: a list, a page for each failure, and one page for the codes of onegraph's own errors.

bash scripts/setup && .venv/bin/python scripts/write_failures.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

from onegraph.explain.entry import CATEGORIES, OWN, Entry, catalogue

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "failures"
TITLES = {
    "compile_error": "Errors while compiling",
    "silent_failure": "Silent failures",
    "saving": "Saving, loading, resuming",
    "precision": "Precision",
    "speed": "Memory and speed",
    "quantisation": "Quantised bases",
    "distributed": "Several processes",
    "hot_swap": "Hot-swapping and pipelines",
    "environment": "Environment",
}
HEAD = """# Failures
Known failures of torch.compile with adapters: what they mean, what helps, what doesn't. `onegraph explain < traceback.txt` finds the entry
of an error, `onegraph explain NAME --run` runs its reproduction and its fix with your versions.

These pages are written by `scripts/write_failures.py` from the files in `src/onegraph/explain/catalogue/`; `bash scripts/verify_failures`
runs every program in them and writes down what was seen.
"""


def pages() -> dict[Path, str]:
    """Every page by its path below docs/failures."""
    entries = catalogue()
    foreign = [entry for entry in entries.values() if entry.domain != OWN]
    found = {Path(f"{entry.id}.md"): page(entry, entries) for entry in foreign}
    found[Path("README.md")] = index(foreign)
    found[Path("onegraph.md")] = codes([entry for entry in entries.values() if entry.domain == OWN])
    return found


def index(entries: list[Entry]) -> str:
    ran = [entry for entry in entries if entry.verified]
    both = [entry for entry in ran if entry.fix]
    lines = [HEAD, f"{len(entries)} failures; {len(ran)} of them were run, {len(both)} with a fix that was run as well."]
    lines += ["[The codes of onegraph's own errors](onegraph.md) have a page of their own."]
    for category in CATEGORIES:
        chosen = [entry for entry in entries if entry.category == category]
        if chosen:
            lines += ["", f"## {TITLES[category]}", "| failure | what | standing |", "|---|---|---|"]
            lines += [f"| [{entry.name}]({entry.id}.md) | {cell(entry.title)} | {short_standing(entry)} |" for entry in chosen]
    return "\n".join(lines) + "\n"


def short_standing(entry: Entry) -> str:
    if not entry.verified or entry.reproduction is None:
        return "not run"
    words = {"raises": "raises", "shows": "shown", "gone": "gone"}[entry.reproduction.outcome]
    return words + (", fix runs" if entry.fix else "")


def page(entry: Entry, entries: dict[str, Entry]) -> str:
    lines = [f"# {entry.title}", f"`{entry.id}` · {entry.standing()}", ""]
    lines += ["No error is raised." if entry.silent else "", "```", entry.signature, "```", ""]
    known = [("exception", entry.exception_type), ("graph break", entry.graph_break_id), ("frames in", entry.modules)]
    lines += [f"- {name}: {', '.join(f'`{value}`' for value in values)}" for name, values in known if values]
    lines += [f"- words: `{entry.regex}`"] if entry.regex else []
    lines += [
        f"- {item.version}: {item.status}" + (f" ({item.behavior_change})" if item.behavior_change else "") for item in entry.versions
    ]
    lines += ["", "## Why", entry.root_cause, "", "## What to do"]
    lines += fixes(entry, chinese=False)
    lines += ["", "## What doesn't help", *(f"- {item.action}: {item.why_fails}" for item in entry.dead_ends)]
    lines += [f"- {name}: {text}" for name, text in entry.os_specific.items()]
    lines += related(entry, entries)
    for title, program, seen in (
        ("Reproduction", entry.reproduction, entry.observed.reproduction if entry.observed else ""),
        ("Fix", entry.fix, entry.observed.fix if entry.observed else ""),
    ):
        if program is not None:
            lines += ["", f"## {title}", "```python", program.code.rstrip("\n"), "```"]
            if entry.verified and seen:
                lines += ["What was seen:", "", "```text", seen, "```"]
    lines += ["", f"## {entry.title_zh}", entry.signature_zh, "", entry.root_cause_zh, "", "解决办法：", ""]
    lines += fixes(entry, chinese=True)
    lines += ["", "无效的做法：", "", *(f"- {item.action_zh}：{item.why_fails_zh}" for item in entry.dead_ends)]
    sources = [*([entry.official_doc_url] if entry.official_doc_url else []), *entry.sources]
    lines += ["", "## Sources", *(f"- {source}" for source in sources)] if sources else []
    return "\n".join(lines) + "\n"


def fixes(entry: Entry, *, chinese: bool) -> list[str]:
    lines = []
    for number, item in enumerate(entry.workarounds, 1):
        lines.append(f"{number}. {item.action_zh if chinese else item.action}")
        if item.how:
            lines += ["   ```", *(f"   {line}" for line in item.how.splitlines()), "   ```"]
    return lines


def related(entry: Entry, entries: dict[str, Entry]) -> list[str]:
    words = {"leads_to": "leads to", "preceded_by": "comes after", "frequently_confused_with": "not to be confused with"}
    lines = [
        f"- {title}: " + ", ".join(f"[{entries[name].title}](../{name}.md)" for name in names)
        for kind, title in words.items()
        if (names := getattr(entry.transition_graph, kind))
    ]
    return ["", "## Related", *lines] if lines else []


def codes(entries: list[Entry]) -> str:
    lines = ["# Codes of onegraph's errors", "Every error ends in its code, in brackets; `onegraph explain CODE` shows its entry.", ""]
    lines += ["| code | what | why | what to do |", "|---|---|---|---|"]
    for entry in entries:
        todo = "; ".join(item.action + (f" `{item.how}`" if item.how else "") for item in entry.workarounds)
        lines.append(f"| `{entry.name}` | {cell(entry.title)} | {cell(entry.root_cause)} | {cell(todo)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """A text in one cell of a table."""
    return " ".join(text.split()).replace("|", "&#124;")


if __name__ == "__main__":
    written = pages()
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path, text in written.items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")
