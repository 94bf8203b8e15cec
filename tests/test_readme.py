"""What the README says is true: its names exist, its example prints what it shows, its commands parse."""

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

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def section(title):
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def defined_names(path):
    """Classes and functions at the top of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def named_code():
    """(file, name) of every row of the table from equations to code."""
    for row in section("From the papers' equations to the code").splitlines():
        if row.startswith("|") and "`" in row:
            for part in row.split("|")[3].split(";"):
                path, names = part.removeprefix(" on a GPU").split(":")
                for name in re.findall(r"`([^`]+)`", names):
                    yield path.strip(" `"), name


@pytest.mark.parametrize(("path", "name"), list(named_code()))
def test_the_names_in_the_table_of_equations_exist(path, name):
    assert name in defined_names(ROOT / path)


def test_the_table_names_something():
    assert len(list(named_code())) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_example_prints_what_it_shows():
    code, = blocks(section("An example"), "python")
    shown, = blocks(section("An example"), "text")
    assert len(code.strip().splitlines()) <= 20
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "README example", "exec"), {})
    assert out.getvalue() == shown


def test_the_layer_to_copy_passes_its_check(tmp_path):
    text = section("Adding a layer, and checking it")
    code, = blocks(text, "python")
    (tmp_path / "scale.py").write_text(code, encoding="utf-8")
    commands = re.findall(r"^    python (-m minigrad.gradcheck .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "where.png").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("task", ["adding", "char_lm", "tsdae", "clipping", "imdb", "pixel_mnist"])
def test_the_commands_of_the_tasks_parse(task, page):
    parse = importlib.import_module(f"tasks.{task}").parse
    pattern = rf"python tasks/{task}\.py((?: --?[\w-]+(?: (?:[\w,./][\w,./-]*|\"[^\"]*\"))?)*)"
    for command in re.findall(pattern, page.read_text(encoding="utf-8")):
        if "--resume" not in command:
            parse(shlex.split(command))


def test_ci_runs_the_readmes_test_command():
    pattern = re.compile(r"^ +python3 -m venv .*pytest.*$", re.MULTILINE)
    assert len(pattern.findall(README)) == 1
    assert "grep -E '^ +python3 -m venv .*pytest' README.md" in (ROOT / ".ci/run").read_text(encoding="utf-8")
