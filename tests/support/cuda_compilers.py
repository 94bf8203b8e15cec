"""The CUDA compilers, which need no GPU: nvcc, and NVRTC, which CuPy uses, where a package brings it."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cuda_shim import families

from minigrad.kernels import launch

ARCHITECTURES = ("75", "80", "90")


def nvcc_problem():
    """None when nvcc can be called, else why not."""
    return None if shutil.which("nvcc") else "there is no nvcc to compile the kernels with"


def one_text():
    """All families in one text, each in a namespace of its own."""
    return "\n".join(f"namespace {family}_cu {{\n{launch.source(family)}\n}}" for family in families())


def nvcc(dtype, folder):
    """{(kernel, architecture): what ptxas says of it}, of every kernel. AssertionError with the log."""
    path = folder / f"{dtype}.cu"
    path.write_text(one_text(), "utf-8")
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    command = ["nvcc", *launch.options(dtype), *targets, "-Xptxas", "-v", "-c", path.name, "-o", f"{dtype}.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return ptxas_reports(done.stderr)


def ptxas_reports(log):
    reports = {}
    for part in log.split("Compiling entry function")[1:]:
        name, sm = re.match(r" '(\w+)' for 'sm_(\w+)'", part).groups()
        reports[name, sm] = part
    return reports


def numbers(report):
    """(spill bytes stored, loaded, stack bytes, registers) of a ptxas report."""
    stack, stores, loads = (int(re.search(rf"(\d+) bytes {what}", report)[1])
                            for what in ("stack frame", "spill stores", "spill loads"))
    return stores, loads, stack, int(re.search(r"Used (\d+) registers", report)[1])


def nvrtc_library():
    """The path of an NVRTC that a Python package brought (nvidia-cuda-nvrtc, CuPy's own dependency), or None."""
    found = [path for folder in map(Path, sys.path) for path in folder.glob("nvidia/**/libnvrtc.so.*")
             if "builtins" not in path.name and "alt" not in path.name]
    return found[0] if found else None


def nvrtc(library, text, options, sm):
    """(the cubin, the log) of a text compiled by NVRTC. AssertionError with the log."""
    library, program, size = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    given = [f"-arch=sm_{sm}".encode(), *(option.encode() for option in options)]
    status = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    return cubin.raw, log.value.decode()
