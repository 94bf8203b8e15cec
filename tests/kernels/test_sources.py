"""The text of the CUDA kernels: no 32-bit offsets, no sums in no fixed order; and the compilers, nvcc and NVRTC."""

import importlib
import re

import cuda_shim
import pytest
from cuda_compilers import ARCHITECTURES, numbers, nvcc, nvcc_problem, nvrtc, nvrtc_library, one_text

from minigrad.kernels import launch
from minigrad.optim import SGD, Adadelta, Adam, AdamW, Momentum, RAdam, RMSprop

every_dtype = pytest.mark.parametrize("dtype", launch.TYPES)

ALLOWED = [r"typedef long long Index;", r"const int [A-Z_0-9]+ = [^;]*;", r"for \(int s = 0; s < [A-Z_]+;",
           r"for \(unsigned \w+ = (1|blockDim\.x / 2);", r"unsigned short"]
FORBIDDEN = {
    "a 32-bit number that could be an offset": r"\b(int|unsigned|short|long|char|size_t)\b",
    "a product of 32-bit built-in variables": r"(?<!\(Index\))\b(threadIdx|blockIdx|blockDim|gridDim)\.\w \*",
    "a product of a 32-bit constant": r"\b(\d+|[A-Z_]{2,}) \* (threadIdx|blockIdx|blockDim|gridDim)\b",
    "something included": r"#\s*include",
    "a warp's own instruction": r"__(shfl|ballot|any|all|syncwarp|reduce)|warpSize",
    "sums in no fixed order": r"\batomic",
    "a constant of one precision": r"\d\.\d*f\b|\bexpf\b|\btanhf\b|\bsqrtf\b",
}


def text_problems(text):
    """What the text of a kernel must not have, each with its line."""
    found = []
    for line in re.sub(r"//.*", "", text).splitlines():
        rest = line
        for allowed in ALLOWED:
            rest = re.sub(allowed, "", rest)
        found += [f"{what}: {line.strip()}" for what, pattern in FORBIDDEN.items() if re.search(pattern, rest)]
    return found


@pytest.mark.parametrize("family", cuda_shim.families())
def test_the_text_of_the_kernels(family):
    assert text_problems(launch.source(family)) == []


@pytest.mark.parametrize("family", cuda_shim.families())
def test_a_constant_of_text_and_launch_is_one(family):
    module = importlib.import_module(f"minigrad.kernels.{family}")
    for line in re.findall(r"const int ([^;]*);", launch.source(family)):
        for name, number in re.findall(r"(\w+) = (\d+)", line):
            assert int(number) == getattr(launch if name == "MOST_THREADS" else module, name.replace("MOST_", ""),
                                          int(number)), name


@pytest.mark.parametrize("family", cuda_shim.families())
def test_every_kernel_is_launched(family):
    launched = set(re.findall(r'"(\w+)"', (launch.FOLDER / f"{family}.py").read_text("utf-8")))
    if family == "optim":
        launched |= {optimizer.kernel for optimizer in (SGD, Momentum, Adadelta, RMSprop, Adam, AdamW, RAdam)}
    assert set(cuda_shim.signatures(launch.source(family))) <= launched


@pytest.mark.parametrize(("family", "right", "wrong"), [
    ("sru", "typedef long long Index;", "typedef int Index;"),
    ("sru", "const Index n = thread_number()", "const int n = thread_number()"),
    ("sru", "(Index)blockIdx.x * blockDim.x", "blockIdx.x * blockDim.x"),
    ("sru", "(Index)blockIdx.x * blockDim.x + threadIdx.x", "(Index)(blockDim.x * blockIdx.x + threadIdx.x)"),
    ("optim", "work[2 * (Index)blockIdx.x]", "work[2 * blockIdx.x]"),
    ("norm", "(Index)gridDim.y * ROWS", "ROWS * gridDim.y"),
    ("lstm", "(Index)blockIdx.y * gridDim.x", "blockIdx.y * gridDim.x"),
    ("norm", "const Index row = blockIdx.x", "const unsigned row = blockIdx.x"),
    ("softmax", "sum = block_sum(sum);", "sum += __shfl_xor_sync(~0, sum, 1);"),
    ("optim", "parts[first_part + blockIdx.x] = sum", "atomicAdd(parts, sum)")])
def test_faults_of_the_text(family, right, wrong):
    assert right in launch.source(family)
    assert text_problems(launch.source(family).replace(right, wrong))


# ---- the compilers ---------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.skipif(nvcc_problem() is not None, reason=str(nvcc_problem()))
@every_dtype
def test_nvcc_compiles_every_kernel(tmp_path, dtype):
    """For three generations of GPUs (ARCHITECTURES); nothing is spilled, and no stack is used, at the newest."""
    reports = nvcc(dtype, tmp_path)
    names = {name for family in cuda_shim.families() for name in cuda_shim.signatures(launch.source(family))}
    assert set(reports) == {(name, sm) for name in names for sm in ARCHITECTURES}
    for (name, sm), report in reports.items():
        stores, loads, stack, registers = numbers(report)
        assert sm != "90" or (stores, loads, stack) == (0, 0, 0), f"{name} spills: {report}"
        assert registers <= 255


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_library() is None, reason="no package brings NVRTC (nvidia-cuda-nvrtc, which CuPy needs)")
@every_dtype
def test_nvrtc_compiles_every_kernel(dtype):
    """With what CuPy calls, and the options it is given."""
    cubin, log = nvrtc(nvrtc_library(), one_text(), launch.options(dtype), "90")
    assert len(cubin) > 1000
    assert "warning" not in log
