"""What the README and docs/ say is true: names and links exist, examples print what they show, commands parse."""

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.frame.flags import settings_of
from tasks.frame.run import parser_of_command

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
EQUATIONS = (ROOT / "docs/equations.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def section(page, title):
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def printed(code):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "example", "exec"), {})
    return out.getvalue()


def defined_names(path):
    """Classes and functions at the top of a file, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def named_code():
    """{path: names} of all rows of the tables from equations to code."""
    files = {}
    for row in EQUATIONS.splitlines():
        if row.startswith("|") and "`" in row:
            for part in row.split("|")[3].split(";"):
                path, names = part.split(":")
                files.setdefault(path.strip(" `"), set()).update(re.findall(r"`([^`]+)`", names))
    return files


@pytest.mark.parametrize(("path", "names"), named_code().items(), ids=named_code())
def test_the_names_in_the_tables_of_equations_exist(path, names):
    assert names
    assert not names - defined_names(ROOT / path)


def test_the_tables_of_equations_cover_the_layers():
    assert len(named_code()) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize(("page", "most"), [("README.md", 160), ("docs/guide.md", 120)])
def test_pages_stay_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_the_example_prints_what_it_shows():
    code, = blocks(section(README, "An example"), "python")
    shown, = blocks(section(README, "An example"), "text")
    assert len([line for line in code.splitlines() if line]) <= 15
    assert printed(code) == shown


def test_the_guides_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed("".join(blocks(section(GUIDE, "The contract in use") + section(GUIDE, "Saving and loading"), "python")))


def gradcheck_commands():
    return re.findall(r"^    python (-m minigrad.gradcheck .*)$", README + GUIDE, re.MULTILINE)


@pytest.mark.parametrize("command", gradcheck_commands())
def test_the_checks_of_layers_pass(command, tmp_path):
    layer, = blocks(section(GUIDE, "A layer of your own"), "python")
    (tmp_path / "scale.py").write_text(layer, encoding="utf-8")
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "where.png").exists() == ("where.png" in command)


@pytest.mark.parametrize("task", ["adding", "char_lm", "tsdae", "imdb", "pixel_mnist"])
def test_the_commands_of_the_tasks_parse(task):
    """In every page but those of docs/results that keep what was run with the flags of its day."""
    task_of = importlib.import_module(f"tasks.{task}").TASK
    pattern = rf"python tasks/{task}\.py((?: (?:--?[\w-]+|[\w,./][\w,./-]*|\"[^\"]*\"))*)"
    commands = [command for page in PAGES if page.parent.name != "results" or page.name == "README.md"
                for command in re.findall(pattern, re.sub(r"  +.*", "", page.read_text(encoding="utf-8"), flags=re.M))]
    assert commands
    for command in commands:
        argv = shlex.split(command)
        if argv and argv[0] in task_of.commands:
            parser_of_command(task_of, argv[0]).parse_args(argv[1:])
        elif "--resume" not in argv:
            settings_of(task_of, argv)


def test_ci_runs_the_readmes_test_command():
    pattern = re.compile(r"^ +python3 -m venv .*pytest.*$", re.MULTILINE)
    assert len(pattern.findall(README)) == 1
    assert "grep -E '^ +python3 -m venv .*pytest' README.md" in (ROOT / ".ci/run").read_text(encoding="utf-8")
