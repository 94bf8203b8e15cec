"""The modules import each other from the lower floors up, and never in a circle (docs of the layout: README.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [
    "tree check", "backend", "memory", "tensors", "parameter", "layer", "packing", "kernels",
    "functional initializers losses", "fast", "layers", "clipping optim schedules", "gradcheck", "training", "data"]
BELOW_KERNELS = {"backend", "memory", "packing", "kernels"}


def module_names():
    """{dotted name: path} of every module of minigrad, models and tasks."""
    paths = [path for package in ("minigrad", "models", "tasks") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


NAMES = module_names()


def imports_of(name, text):
    """The modules of ours that a module's text imports, inside functions too."""
    package = name if NAMES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module if not node.level else ".".join([*package.split(".")[:1 - node.level or None],
                                                                 *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in NAMES or base in NAMES:
                    yield whole if whole in NAMES else base


def hidden_imports(text):
    """The texts of calls of import_module that name one of our modules, or begin to: an import is written as one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and "import_module" in (getattr(node.func, "attr", ""),
                                                              getattr(node.func, "id", "")):
            yield from (ast.unparse(node) for part in ast.walk(node) if isinstance(part, ast.Constant)
                        and str(part.value).partition(".")[0] in ("minigrad", "models", "tasks"))


GRAPH = {name: sorted(set(imports_of(name, path.read_text("utf-8"))) - {name}) for name, path in NAMES.items()}


def circle(graph):
    """A circle as a list of names, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name):]
        if name in done:
            return None
        path.append(name)
        found = next(filter(None, map(visit, graph.get(name, ()))), None)
        path.pop()
        done.add(name)
        return found
    return next(filter(None, map(visit, graph)), None)


def floor(name):
    part = name.split(".")[1]
    return next(n for n, names in enumerate(FLOORS) if part in names.split())


def against_the_floors(graph):
    """Sentences about imports from a floor above, of the framework from models or tasks, of models from tasks."""
    order = ["minigrad", "models", "tasks"]
    for name, imported in graph.items():
        for other in imported:
            a, b = (order.index(n.split(".")[0]) for n in (name, other))
            inside = a == b == 0 and "." in name and "." in other
            if b > a or (inside and floor(other) > floor(name)):
                yield f"{name} imports {other}"
            if inside and name.startswith("minigrad.kernels") and other.split(".")[1] not in BELOW_KERNELS:
                yield f"{name} imports {other}"


def test_there_is_no_circle():
    assert circle(GRAPH) is None


def test_no_module_imports_from_a_floor_above():
    assert list(against_the_floors(GRAPH)) == []


def test_no_import_is_hidden():
    found = {name: calls for name, path in NAMES.items() if (calls := list(hidden_imports(path.read_text("utf-8"))))}
    assert found == {"tasks.frame.results": ["importlib.import_module(f'tasks.{name}')"]}     # the task of a run folder
    for text in ("importlib.import_module('minigrad.memory')", "import_module(f'models.{name}')"):
        assert list(hidden_imports(text)) == [text]


def test_only_some_modules_know_cupy():
    ours = {name: path for name, path in NAMES.items() if name.startswith("minigrad.")}
    knows = {name for name, path in ours.items() if '"cupy' in path.read_text("utf-8")}
    allowed = {"minigrad.backend", "minigrad.memory"}
    assert {name for name in knows if not name.startswith("minigrad.kernels")} <= allowed


@pytest.mark.parametrize(("name", "text", "found"), [
    ("minigrad.tree", "def f():\n    from minigrad import kernels\n", "minigrad.tree imports minigrad.kernels"),
    ("minigrad.kernels", "from minigrad.kernels import launch\nfrom . import lstm\nimport minigrad.optim\n",
     "minigrad.kernels imports minigrad.optim"),
    ("minigrad.kernels.lstm", "from minigrad.layers import lstm\n",
     "minigrad.kernels.lstm imports minigrad.layers.lstm"),
    ("minigrad.layers.rra", "from models import tsdae\n", "minigrad.layers.rra imports models.tsdae")])
def test_a_planted_import_is_found(name, text, found):
    assert found in list(against_the_floors({**GRAPH, name: sorted(set(imports_of(name, text)))}))


def test_a_planted_circle_is_found():
    assert set(circle({**GRAPH, "minigrad.memory": ["minigrad.packing"]})) == {"minigrad.memory", "minigrad.packing"}
