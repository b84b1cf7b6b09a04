"""Entries as text for a terminal, in English or Chinese."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from onegraph.explain.entry import Entry
from onegraph.explain.match import Candidate, Strength

LANGUAGES = ("en", "zh")
_WIDTH = 100
_WORDS = {
    "en": {
        "seen": "what is seen",
        "silent": "what is seen (no error)",
        "cause": "why",
        "fix": "what to do",
        "dead": "what doesn't help",
        "versions": "versions",
        "systems": "systems",
        "observed": "what was seen when it ran",
        "related": "related",
        "sources": "sources",
        "leads_to": "leads to",
        "preceded_by": "comes after",
        "frequently_confused_with": "not to be confused with",
        "run": "onegraph explain {id} --run   reproduces it, and runs the fix, with your versions",
        "because": "because of",
        "several": "{count} entries may explain this, the likeliest first:",
        Strength.MATCH: "match",
        Strength.LIKELY: "likely, from the words",
        Strength.POSSIBLE: "possible: the same kind of graph break, other words",
        "nothing": "Nothing in the catalogue explains this text.",
        "empty": "There is no text to explain.",
        "collect": "To find out more, collect:",
        "unknown": "No entry is called {name}.",
        "near": "Similar names: {names}",
        "torch_page": "What torch says of that graph break: {address}",
        "about": "Entries that mention it:",
    },
    "zh": {
        "seen": "现象",
        "silent": "现象（没有报错）",
        "cause": "原因",
        "fix": "解决办法",
        "dead": "无效的做法",
        "versions": "版本",
        "systems": "系统",
        "observed": "实际运行时看到的",
        "related": "相关条目",
        "sources": "来源",
        "leads_to": "会导致",
        "preceded_by": "发生在其后",
        "frequently_confused_with": "不要混淆",
        "run": "onegraph explain {id} --run   用你的版本复现它，并运行修复程序",
        "because": "依据",
        "several": "有 {count} 个条目可能解释这个问题，最可能的在前：",
        Strength.MATCH: "匹配",
        Strength.LIKELY: "很可能，依据文字",
        Strength.POSSIBLE: "有可能：同一种 graph break，但文字不同",
        "nothing": "目录中没有条目能解释这段文字。",
        "empty": "没有要解释的文字。",
        "collect": "请收集以下信息：",
        "unknown": "没有名为 {name} 的条目。",
        "near": "相近的名称：{names}",
        "torch_page": "torch 对这种 graph break 的说明：{address}",
        "about": "提到它的条目：",
    },
}
COLLECT = (
    ("onegraph explain < traceback.txt", "the whole traceback, from its first line on", "完整的 traceback，从第一行开始"),
    (
        "TORCH_LOGS=graph_breaks,recompiles COMMAND",
        "where the graph breaks, and which guard recompiles",
        "哪里 graph break，哪个 guard 引起重新编译",
    ),
    ("TORCHDYNAMO_VERBOSE=1 COMMAND", "torch's own frames, when an error comes from compiling", "编译报错时 torch 自己的调用栈"),
    (
        'torch.compile(model, backend="eager"), then "aot_eager"',
        "which stage fails: tracing, autograd or inductor",
        "哪个阶段出错：tracing、autograd 还是 inductor",
    ),
    ("python -m torch.utils.collect_env", "versions of torch, Python, compiler and driver", "torch、Python、编译器和驱动的版本"),
    (
        "pip list | grep -iE 'torch|peft|accelerate|transformers|diffusers|bitsandbytes'",
        "versions of the libraries",
        "各个库的版本",
    ),
    ("env | grep -E 'TORCH|ACCELERATE|DYNAMO'", "settings that come from the environment", "来自环境变量的设置"),
)
_FRAME = re.compile(r"Traceback \(|  (?:File |\.\.\.)")
_OBSERVED_LINES = 12
_GRAPH_BREAKS = "https://meta-pytorch.github.io/compile-graph-break-site/gb"


def explanation(found: Sequence[Candidate], language: str = "en") -> str:
    """What the candidates say: the first in full, the others by name and reason.

    Args:
        found: Best first; empty gives what to collect.
        language: "en" or "zh".
    """
    if not found:
        return nothing_found(language)
    words = _WORDS[language]
    parts = [words["several"].format(count=len(found))] if len(found) > 1 else []
    for number, candidate in enumerate(found, 1):
        lead = f"{number}. " if len(found) > 1 else ""
        parts.append(
            f"{lead}{candidate.entry.id}: {_title(candidate.entry, language)} ({words[candidate.strength]})\n"
            f"   {words['because']}: {'; '.join(_in(language, reason) for reason in candidate.reasons)}"
        )
    sure = [candidate for candidate in found if candidate.strength is not Strength.POSSIBLE] or list(found)
    return "\n".join(parts) + "\n\n" + in_full(sure[0].entry, language)


def in_full(entry: Entry, language: str = "en") -> str:
    """All that an entry says, for reading."""
    words, chinese = _WORDS[language], language == "zh"
    lines = [f"{entry.id}: {_title(entry, language)}", f"({_in(language, entry.standing())})"]

    def section(name: str, body: Sequence[str]) -> None:
        if body:
            lines.extend(["", words[name], *body])

    section("silent" if entry.silent else "seen", _wrapped(entry.signature_zh if chinese else entry.signature))
    section("cause", _wrapped(entry.root_cause_zh if chinese else entry.root_cause))
    fixes: list[str] = []
    for number, item in enumerate(entry.workarounds, 1):
        condition = f" ({item.condition})" if item.condition else ""
        fixes += _wrapped(f"{number}. {item.action_zh if chinese else item.action}{condition}")
        fixes += [f"       {line}" for line in item.how.splitlines()]
    section("fix", fixes)
    dead = [(item.action_zh, item.why_fails_zh) if chinese else (item.action, item.why_fails) for item in entry.dead_ends]
    section("dead", [line for action, why in dead for line in _wrapped(f"- {action}: {why}")])
    section("versions", [f"  {item.version}: {item.status}" + _behind(item.behavior_change) for item in entry.versions])
    section("systems", [f"  {name}: {text}" for name, text in entry.os_specific.items()])
    seen = entry.observed if entry.verified else None
    if seen and seen.reproduction:
        told = [line for line in seen.reproduction.splitlines() if line.strip() and not _FRAME.match(line)]
        section("observed", [f"  | {line}" for line in told[:_OBSERVED_LINES]])
    related = [
        f"  {words[kind]}: {', '.join(names)}"
        for kind in ("leads_to", "preceded_by", "frequently_confused_with")
        if (names := getattr(entry.transition_graph, kind))
    ]
    section("related", related)
    documents = [entry.official_doc_url] if entry.official_doc_url else []
    section("sources", [f"  {source}" for source in (*documents, *entry.sources)])
    if entry.reproduction:
        lines += ["", words["run"].format(id=entry.id)]
    return "\n".join(lines)


def nothing_found(language: str = "en") -> str:
    """Says that nothing was found, and what to collect."""
    words = _WORDS[language]
    return "\n".join([words["nothing"], "", words["collect"], *collect_lines(language)])


def empty(language: str = "en") -> str:
    """Says that there was no text, and how to give one."""
    words = _WORDS[language]
    return "\n".join([words["empty"], "", words["collect"], *collect_lines(language)[:2]])


def not_called(name: str, near: Sequence[str], about: Sequence[Entry], language: str = "en") -> str:
    """Says that no entry has that name, and which come near it or mention it."""
    words = _WORDS[language]
    lines = [words["unknown"].format(name=name)]
    if re.fullmatch(r"(?i)gb\d{4}", name):
        lines.append(words["torch_page"].format(address=f"{_GRAPH_BREAKS}/{name.lower()}.html"))
    if near:
        lines.append(words["near"].format(names=", ".join(near)))
    if about:
        lines += [words["about"], *listing(about, language).splitlines()]
    return "\n".join(lines)


def listing(entries: Sequence[Entry], language: str = "en") -> str:
    """One line an entry."""
    width = max((len(entry.id) for entry in entries), default=0)
    return "\n".join(f"{entry.id:<{width}}  {_title(entry, language)}" for entry in entries)


def collect_lines(language: str = "en") -> list[str]:
    """The commands that say more about a failure, each with what it shows."""
    return [line for command, english, chinese in COLLECT for line in (f"  {command}", f"      {chinese if language == 'zh' else english}")]


# What the matching and the entries say by themselves, in English.
_SAID = (
    (r"^exception (.+)$", r"异常 \1"),
    (r"^a frame in (.+)$", r"调用栈中有 \1"),
    (r"^the words (.+)$", r"文字 \1"),
    (r"^onegraph's code (.+)$", r"onegraph 的错误码 \1"),
    (r"^but the words are not the known ones$", "但文字与已知的不同"),
    (r"^an error of onegraph's own$", "onegraph 自己的错误"),
    (r"^verified with (.+) on (\S+), where it doesn't happen any more$", r"已于 \2 用 \1 验证，问题不再出现"),
    (r"^verified with (.+) on (\S+)$", r"已于 \2 用 \1 验证"),
    (r"^not verified: (.+)$", r"未验证：\1"),
)


def _in(language: str, said: str) -> str:
    """A reason or standing in the reader's language."""
    if language == "zh":
        for pattern, chinese in _SAID:
            if re.match(pattern, said):
                return re.sub(pattern, chinese, said)
    return said


def _title(entry: Entry, language: str) -> str:
    return entry.title_zh if language == "zh" else entry.title


def _wrapped(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.splitlines():
        wide = any("\u4e00" <= character <= "\u9fff" for character in paragraph)  # a Chinese character takes two columns
        hanging = "     " if re.match(r"- |\d+\. ", paragraph) else "  "
        lines += textwrap.wrap(paragraph, _WIDTH // 2 if wide else _WIDTH, initial_indent="  ", subsequent_indent=hanging) or [""]
    return lines


def _behind(text: str | None) -> str:
    return f" ({text})" if text else ""
