"""Shared by all tests. One BLAS thread: the suite runs beside other things, and its arrays are small."""

import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from minigrad.backend import gpu_problem
from minigrad.data.files import find_file

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """With -n each file goes to one worker, whole, in our order: what it makes once for its tests is made once."""
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):           # of pytest-xdist: what takes long first, so that all end together
        items.sort(key=lambda item: not {"tasks", "kernels", "models"} & set(item.path.parts))
    problem = gpu_problem()
    if problem:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def real_data():
    """f(name) -> the path of a real data file in $MINIGRAD_DATA or ../shared/data; skips the test where it is not."""
    folders = [folder for folder in (os.environ.get("MINIGRAD_DATA"), ROOT.parent / "shared/data") if folder]

    def find(name):
        for folder in folders:
            path = find_file([name], folder)
            if path is not None:
                return path
        pytest.skip(f"{name} is not in {' or '.join(map(str, folders))}")
    return find


@pytest.fixture
def quick_figures(request, monkeypatch):
    """Figures are composed but not rendered, which is most of a small run's time; a test marked `figures` has them."""
    if not request.node.get_closest_marker("figures"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **how: Path(path).write_bytes(b""))


@pytest.fixture
def fake_gpu(monkeypatch):
    """The strict stand-in for CuPy (tests/support/fake_cupy.py) as the module cupy: one device, no kernels."""
    import fake_cupy

    monkeypatch.setenv("MINIGRAD_KERNELS", "0")
    return fake_cupy.install(monkeypatch)
