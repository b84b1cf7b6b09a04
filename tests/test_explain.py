"""The catalogue of failures: valid files, texts that only their own entry explains, programs that do what they say, the command."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onegraph import explain
from onegraph.cli import sd_table, text_settings
from onegraph.cli.main import main
from onegraph.compiling.failures import explained
from onegraph.errors import CompileError, ConfigurationError, OnegraphError
from onegraph.explain import OWN, Entry, Strength, reproduce, show
from onegraph.explain.entry import OUTCOMES, Program, read
from onegraph.explain.match import candidates, clues
from unrelated_tracebacks import UNRELATED

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "onegraph"
ENTRIES = explain.entries()
FOREIGN = [entry for entry in ENTRIES.values() if entry.domain != OWN]
DOMAINS = sorted({entry.domain for entry in ENTRIES.values()})
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def identity(entry: Entry) -> str:
    return entry.id


# The files


def test_there_are_enough_entries_and_most_of_them_ran() -> None:
    assert len(FOREIGN) >= 90
    assert len([entry for entry in FOREIGN if entry.verified and entry.reproduction and entry.fix]) >= 65


@pytest.mark.parametrize("domain", DOMAINS)
def test_entries_are_whole(domain: str) -> None:
    for entry in ENTRIES.values():
        if entry.domain == domain:
            check_whole(entry)


def check_whole(entry: Entry) -> None:
    edges = entry.transition_graph
    assert {*edges.leads_to, *edges.preceded_by, *edges.frequently_confused_with} <= ENTRIES.keys() - {entry.id}
    for text in (entry.title_zh, entry.signature_zh, entry.root_cause_zh, *(item.action_zh for item in entry.workarounds)):
        assert CHINESE.search(text) or re.fullmatch(r"[\x00-\x7f]+", text), text
    assert CHINESE.search(entry.title_zh)
    assert CHINESE.search(entry.root_cause_zh)
    assert not CHINESE.search(entry.root_cause + entry.title)
    assert not re.search(r"\d\s*% (?:of the time|success|fail)", entry.root_cause)


@pytest.mark.parametrize("entry", [entry for entry in FOREIGN if entry.reproduction], ids=identity)
def test_programs_are_those_that_were_run(entry: Entry) -> None:
    assert entry.verified, "its programs have changed: bash scripts/verify_failures"
    assert entry.reproduction is not None
    assert entry.reproduction.outcome in OUTCOMES
    if entry.reproduction.outcome != "raises":
        checks = [node for node in ast.walk(ast.parse(entry.reproduction.code)) if isinstance(node, ast.Assert | ast.Raise)]
        assert checks, "a program that can't fail shows nothing"


def test_every_file_is_read_and_ships_with_the_package() -> None:
    files = {str(path.relative_to(SOURCE / "explain" / "catalogue").with_suffix("")) for path in SOURCE.glob("explain/catalogue/*/*.toml")}
    assert files == set(ENTRIES)


VALID = (SOURCE / "explain/catalogue/peft/data-dependent-branching.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('title = "', 'titel = "', "unknown: titel"),
        ('category = "compile_error"', 'category = "other"', "category is 'other'"),
        ("graph_break_id = [", 'graph_break_id = ["170", ', "graph_break_id: '170'"),
        ("exception_type = [", 'exception_type = ["Unsupported", ', "'Unsupported' is not qualified"),
        ("regex = 'Data", "regex = '(Data", "regex: "),
        ('outcome = "raises"', 'outcome = "fails"', "reproduction.outcome is 'fails'"),
        ("written = 2026-11-30", 'written = "yesterday"', "written: 'yesterday' is not a date"),
        ("[[dead_ends]]", "[[dead_ends]]\nfail_rate = 0.9", "unknown: fail_rate"),
        ('id = "peft/data', 'id = "torch/data', "id is 'torch/data-dependent-branching'"),
        ("[[versions]]", "[versions]", "versions: not a list of tables"),
        ('title_zh = "LoHa', 'title_zh = ""\nsubcategory = "LoHa', "title_zh is empty"),
    ],
)
def test_a_wrong_file_is_refused(before: str, after: str, said: str) -> None:
    assert before in VALID
    read(VALID, "peft/data-dependent-branching")
    with pytest.raises(ConfigurationError) as caught:
        read(VALID.replace(before, after, 1), "peft/data-dependent-branching")
    assert caught.value.code == "catalogue-entry"
    assert said in str(caught.value)


def test_what_was_observed_belongs_to_the_programs() -> None:
    entry = read(VALID, "peft/data-dependent-branching")
    changed = read(VALID.replace("import torch\n", "import torch  # changed\n", 1), "peft/data-dependent-branching")
    assert entry.verified
    assert entry.standing().startswith("verified with torch 2.")
    assert not changed.verified
    assert changed.standing().startswith("not verified")
    assert changed.record()["observed"] is None


# Matching


def own_text(entry: Entry) -> str:
    return f"error: {entry.title}\n{entry.root_cause}\n\nhint: {entry.workarounds[0].action}\n[{entry.name}]\n"


SAMPLES = [(entry, text) for entry in FOREIGN for text in entry.samples]


@pytest.mark.parametrize(("entry", "text"), SAMPLES, ids=[entry.id for entry, _ in SAMPLES])
def test_only_its_own_entry_explains_a_sample(entry: Entry, text: str) -> None:
    check_winner(entry, text)


def test_only_its_own_entry_explains_an_error_of_ours() -> None:
    for entry in ENTRIES.values():
        if entry.domain == OWN:
            check_winner(entry, own_text(entry))


def check_winner(entry: Entry, text: str) -> None:
    found = candidates(text, ENTRIES.values())
    assert found
    assert found[0].entry.id == entry.id, [item.entry.id for item in found]
    assert found[0].strength >= Strength.LIKELY
    assert found[0].reasons
    # several candidates are ranked: never a tie at the top, and no other as sure
    assert all(item.rank < found[0].rank for item in found[1:])
    assert all(item.strength < Strength.MATCH for item in found[1:]), [item.entry.id for item in found]


def test_most_entries_that_raise_have_a_sample() -> None:
    without = [entry.id for entry in FOREIGN if not entry.samples and not entry.silent]
    assert without == []


@pytest.mark.parametrize("name", UNRELATED)
def test_an_unrelated_error_is_not_explained(name: str) -> None:
    assert [item.entry.id for item in candidates(UNRELATED[name], ENTRIES.values())] == []


def test_there_are_thirty_unrelated_errors() -> None:
    assert len(UNRELATED) >= 30


LOKR = next(text for entry, text in SAMPLES if entry.id == "peft/data-dependent-branching")


@pytest.mark.parametrize(
    "dressed",
    [
        "\n".join(f"[rank0]: {line}" for line in LOKR.splitlines()),
        "\n".join(f"E   {line}" for line in LOKR.splitlines()),
        LOKR.replace("\n", "\r\n"),
        f"\x1b[31m{LOKR}\x1b[0m",
        f"step 1\nstep 2\n{LOKR}\nsome more log\n",
    ],
    ids=["torchrun", "pytest", "windows", "colour", "log"],
)
def test_a_pasted_text_is_found_in_any_dress(dressed: str) -> None:
    assert candidates(dressed, ENTRIES.values())[0].entry.id == "peft/data-dependent-branching"


def test_another_exception_with_the_same_words_is_not_explained() -> None:
    assert candidates(LOKR.replace("torch._dynamo.exc.Unsupported", "mine.Unsupported"), ENTRIES.values()) == []


def test_another_number_with_the_same_words_is_not_explained() -> None:
    assert candidates(LOKR.replace("gb0170", "gb0999"), ENTRIES.values()) == []


def test_a_known_number_with_other_words_is_only_possible() -> None:
    text = "torch._dynamo.exc.Unsupported: Something new\n https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0170.html\n"
    found = candidates(text, ENTRIES.values())
    assert found[0].strength is Strength.POSSIBLE
    assert not any(item.strength is Strength.MATCH for item in found)


def test_words_alone_are_less_than_a_match() -> None:
    found = candidates(
        "Please convert all Tensors to FakeTensors first or instantiate FakeTensorMode with 'allow_non_fake_inputs'", ENTRIES.values()
    )
    assert [item.entry.id for item in found] == ["torch/fake-tensor-patched-forward"]
    assert found[0].strength is Strength.LIKELY


CPP = "torch._inductor.exc.CppCompileError: C++ compile error\n\nOutput:\n"  # the compiler speaks the user's language


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RuntimeError: torch.compile is not supported for PEFT models with dynamic adapters", "peft/dynamic-adapters-message"),
        ("运行时错误：PEFT模型与动态适配器不兼容torch.compile", "peft/dynamic-adapters-message"),
        (f"{CPP}main.cpp:1:10: 致命错误：Python.h：没有那个文件或目录", "environment/python-headers-missing"),
        (f"{CPP}main.cpp:1:10: 致命错误： omp.h：没有那个文件或目录", "environment/openmp-missing"),
    ],
)
def test_messages_in_both_languages_are_found(text: str, name: str) -> None:
    assert candidates(text, ENTRIES.values())[0].entry.id == name


def test_a_code_in_brackets_counts_only_under_an_error_of_ours() -> None:
    assert clues("[compile]\nbackend = 1").codes == ()
    assert clues("error: no\n[compile]").codes == ("compile",)


def test_the_cause_of_an_error_of_ours_comes_first() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x

    with pytest.raises(CompileError) as caught, explained("eager"):
        torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(1))
    found = explain.explain(caught.value)
    assert [item.entry.id for item in found if item.strength is Strength.MATCH] == ["torch/unsupported-builtin", "onegraph/graph-break"]


# Every code of ours


def raised_codes() -> set[str]:
    """Every code that the source raises: of error classes, of ``code=``, and of functions with a parameter ``code``."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    makers: dict[str, int] = {}  # functions that pass a code on, and at which place they take it
    named: dict[str, int] = {}
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            places = {argument.arg: place for place, argument in enumerate([*node.args.args, *node.args.kwonlyargs])}
            if "code" in places:
                makers[node.name] = places["code"]
                found |= {
                    text for default in [*node.args.defaults, *node.args.kw_defaults] if default for text in words(default) if "-" in text
                }
            for call in ast.walk(node):
                for keyword in call.keywords if isinstance(call, ast.Call) else []:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Name) and keyword.value.id in places.keys() - {"code"}:
                        named[node.name] = places[keyword.value.id]
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            found |= {
                text
                for line in node.body
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code"
                for text in words(line.value)
            }
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code" and isinstance(node.value, ast.IfExp):
            found |= set(words(node.value))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name.endswith("Error") or name in makers:
            found |= {text for keyword in node.keywords if keyword.arg == "code" for text in words(keyword.value)}
        for functions in (makers, named):
            if name in functions and len(node.args) > functions[name]:
                found |= set(words(node.args[functions[name]]))
    return found | {"first_form", "second_form"}  # LoKr asks for both in one loop over their names


def words(node: ast.expr) -> Iterator[str]:
    """The constants that an expression may be, or none when it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    if isinstance(node, ast.IfExp):
        yield from words(node.body)
        yield from words(node.orelse)


def test_every_code_of_ours_has_an_entry_and_no_entry_is_left_over() -> None:
    codes, known = raised_codes(), {entry.name for entry in ENTRIES.values() if entry.domain == OWN}
    assert {"graph-break", "not-found", "model-file-truncated", "init", "first_form", "finite-number", "unmergeable"} <= codes
    assert sorted(codes - known) == [], "a code without an entry in explain/catalogue/onegraph"
    assert sorted(known - codes) == [], "an entry without a code: delete its file"


def test_flags_named_by_our_entries_exist() -> None:
    told = "\n".join(item.how for entry in ENTRIES.values() if entry.domain == OWN for item in entry.workarounds)
    flags = set(re.findall(r"--([a-z][\w-]+)", told))
    of_others = {"flag", "num_processes", "multi_gpu", "tee", "log_dir", "part", "force", "reference"}  # launchers, check, cache
    known = {name for name, flag in sd_table.FLAGS.items() if not flag.refusal} | {
        f"{no}{name}" for name in text_settings.FLAGS for no in ("", "no-")
    }
    assert sorted(flags - of_others - known) == []


def test_codes_that_come_from_names_are_raised() -> None:
    import onegraph

    for field in ("first_form", "second_form", "init"):
        with pytest.raises(OnegraphError) as caught:
            onegraph.LoKr(rank=2, **{field: "nonsense"})
        assert caught.value.code == field


# The programs


QUICK = [
    pytest.param("peft/data-dependent-branching", marks=pytest.mark.slow),  # importing peft takes the time
    "torch/autograd-function-mark-dirty",
    "torch/checkpoint-side-effect",
    "torch/data-dependent-guard",
    "torch/double-compile-returns-function",
    "torch/fake-mode-mixing",
    "torch/fake-tensor-patched-forward",
    "torch/hooks-added-after-compile",
    "torch/module-backward-hook",
    "torch/orig-mod-unexpected-keys",
    "torch/parameter-made-in-forward",
    "torch/recompile-limit-fullgraph",
    "torch/recompile-limit-silent-eager",
]


@pytest.fixture
def fresh_compiler() -> None:
    """What a fork of this process starts from."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", QUICK)
def test_reproduction_and_fix_do_what_they_say(name: str) -> None:
    entry = ENTRIES[name]
    for program in (entry.reproduction, entry.fix):
        assert program is not None
        judged = reproduce.judge(entry, program, reproduce.run(program, warm=True), ENTRIES)
        assert judged.right, judged.problem


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (Program(code="raise ValueError('other')", outcome="raises"), "is matched with nothing"),
        (Program(code="pass", outcome="raises"), "it raised nothing"),
        (Program(code="assert False", outcome="shows"), "it ended with status 1"),
        (Program(code="raise SystemExit('no')"), "it ended with status 1"),
        (Program(code="while True: pass", timeout_seconds=1), "its limit of 1 s"),
    ],
    ids=["another error", "no error", "not shown", "exit", "endless"],
)
def test_a_program_that_does_something_else_is_found_out(program: Program, problem: str) -> None:
    judged = reproduce.judge(ENTRIES["peft/data-dependent-branching"], program, reproduce.run(program, warm=True), ENTRIES)
    assert not judged.right
    assert problem in judged.problem


# The command


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def paste(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_traceback_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paste(monkeypatch, LOKR)
    status, out, _ = command(capsys, "--language", "en")
    assert status == 0
    assert out.startswith("peft/data-dependent-branching: ")
    assert "graph break GB0170" in out
    assert "verified with torch" in out


def test_what_is_not_found_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paste(monkeypatch, UNRELATED["zero-division"])
    status, out, _ = command(capsys, "--language", "en")
    assert status == 1
    assert "Nothing in the catalogue explains this text." in out
    assert "TORCH_LOGS=graph_breaks,recompiles" in out
    paste(monkeypatch, UNRELATED["zero-division"])
    assert "没有条目" in command(capsys, "--language", "zh")[1]


# the fields of a public record of such a failure, which ours has to have
RECORD = """
id signature signature_zh regex domain category subcategory root_cause root_cause_type root_cause_zh versions os_specific dead_ends
workarounds workarounds_zh transition_graph official_doc_url official_doc_section error_code verification_tier confidence
fix_success_rate resolvable first_seen last_confirmed last_updated evidence_count tags locale aliases
""".split()


def test_json_is_the_record_without_invented_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paste(monkeypatch, LOKR)
    (record,) = json.loads(command(capsys, "--json")[1])
    assert [name for name in RECORD if name not in record] == []
    assert {"exception_type", "graph_break_id", "reproduction", "fix", "observed", "verified", "matched"} <= record.keys()
    assert record["confidence"] is record["fix_success_rate"] is None
    assert {item["fail_rate"] for item in record["dead_ends"]} == {item["success_rate"] for item in record["workarounds"]} == {None}
    assert set(record["dead_ends"][0]) >= {"action", "why_fails", "fail_rate", "condition", "sources"}
    assert set(record["versions"][0]) >= {"version", "introduced", "deprecated", "removed", "behavior_change", "status"}
    assert record["matched"]["strength"] == "match"
    everything = json.loads(command(capsys, "--list", "--json")[1])
    assert [item["id"] for item in everything] == list(ENTRIES)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (("graph-break",), ["onegraph/graph-break"]),
        (("peft/dynamic-adapters-message",), ["peft/dynamic-adapters-message"]),
        (("torch-compile-incompatible-with-peft",), ["peft/dynamic-adapters-message"]),
        (("[triton-missing]",), ["onegraph/triton-missing", "environment/triton-missing"]),
        (("alpha", "rank"), ["onegraph/alpha", "onegraph/rank"]),
        (("GB0170",), ["peft/data-dependent-branching"]),
    ],
)
def test_an_entry_is_found_by_its_names(code: tuple[str, ...], names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, *code, "--json")
    assert status == 0
    assert [record["id"] for record in json.loads(out)] == names


def test_an_unknown_name_lists_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = command(capsys, "dora-isinstance-by-strings", "--language", "en")
    assert status == 1
    assert "peft/dora-isinstance-by-string" in err
    status, _, err = command(capsys, "label", "smoothing", "--language", "en")
    assert status == 1
    assert "transformers/label-smoothing-shift-lost" in err


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_entry_can_be_shown(domain: str, language: str) -> None:
    for entry in ENTRIES.values():
        if entry.domain == domain:
            text = show.in_full(entry, language)
            assert text.startswith(f"{entry.id}: ")
            assert ("what to do" in text, "解决办法" in text) == (language == "en", language == "zh")


def test_a_file_and_a_message_are_explained_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = ENTRIES["torch/invalid-backend-name"].samples[0]
    log = tmp_path / "a log.txt"
    log.write_bytes(b"\xff\x00 step 1\n" + sample.encode())
    assert main(["explain", str(log), "--language", "en"]) == 0
    assert capsys.readouterr().out.startswith("torch/invalid-backend-name")
    assert main(["explain", sample.splitlines()[-1], "--language", "zh"]) == 0
    said = capsys.readouterr().out
    assert "异常 torch._dynamo.exc.InvalidBackend" in said
    assert "the words" not in said
    assert "verified" not in said.splitlines()[4]
    assert main(["explain", "no such words here"]) == 1


def test_no_text_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain", "--language", "en"]) == 1
    assert "no text" in capsys.readouterr().out
    assert main(["explain", ""]) == 1
    assert len(capsys.readouterr().err.splitlines()) < 5


def test_an_unknown_number_of_a_break_has_torchs_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gb9999"]) == 1
    assert "/gb/gb9999.html" in capsys.readouterr().err


def test_a_log_of_several_failures_names_those_alone() -> None:
    samples = {entry.id: entry.samples[0] for entry in FOREIGN if entry.samples}
    names = list(samples)
    for first, second, third in zip(names, names[7:], names[19:], strict=False):
        three = {first, second, third}
        found = explain.explain("\n[INFO] step 12, loss 0.3\n".join(samples[name] for name in three))
        sure = {candidate.entry.id for candidate in found if candidate.strength > Strength.POSSIBLE}
        assert sure <= three
        assert len(sure) >= 2


def test_mistakes_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "--run")[0] == 2
    status, _, err = command(capsys, "onegraph/alpha", "--run")
    assert status == 2
    assert "more: onegraph explain missing-setting" in err


def test_an_error_of_ours_offers_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    from onegraph import train_network

    assert train_network.main(["--no_such_flag=1"]) == 2
    assert "\nmore: onegraph explain " in capsys.readouterr().err


@pytest.mark.slow
def test_the_programs_run_with_the_users_versions(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "torch/double-compile-returns-function", "--run")
    assert status == 0, out
    assert out.count("as the entry says") == 2


def test_no_torch_is_needed_to_explain() -> None:
    program = (
        "import sys, onegraph.cli.explain as e, onegraph.explain as x; assert len(x.entries()) > 90; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# The pages


def test_the_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("write_failures", ROOT / "scripts" / "write_failures.py")
    assert spec is not None
    assert spec.loader is not None
    write_failures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_failures)
    pages = {write_failures.FOLDER / path: text for path, text in write_failures.pages().items()}
    there = {path: path.read_text(encoding="utf-8") for path in write_failures.FOLDER.rglob("*.md")}
    assert there == pages, "the catalogue has changed: .venv/bin/python scripts/write_failures.py"
    links = [(page, link) for page, text in pages.items() for link in re.findall(r"\]\(([^)#:]+\.md)\)", text)]
    assert [link for page, link in links if not (page.parent / link).is_file()] == []
