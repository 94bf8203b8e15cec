"""Shared by all tests. One BLAS thread: the suite runs beside other things, and its arrays are small."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))      # so that tests can share cases.py and oracles.py

import pytest

from minigrad.backend import gpu_problem


def pytest_collection_modifyitems(items):
    problem = gpu_problem()
    if problem:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=problem))
