"""The public names of the real CuPy, kept in fake_cupy_names.txt: what tests/fake_cupy.py may offer.

    python tests/fake_cupy_names.py > tests/fake_cupy_names.txt      with CuPy installed; no GPU is needed

A line is a dotted name and what it is: `numpy` (NumPy's own object), `module`, `class`, `value`, `attribute`, `ufunc
NIN NOUT`, or `(` and the parameters: `axis=` has a default, `*` ends the positional ones, `*args` takes any number.
"""

import functools
import inspect
import re
import types
import warnings
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("fake_cupy_names.txt")
PLACES = ("cupy", "cupy.ndarray", "cupy.ufunc", "cupy.random", "cupy.random.Generator", "cupy.linalg", "cupy.fft",
          "cupy.cuda", "cupy.cuda.Event", "cupy.cuda.MemoryPool", "cupy.cuda.runtime", "cupyx", "cupyx.scipy",
          "cupyx.scipy.special")


def recorded():
    """(CuPy's version, {dotted name: what it is}) of the file."""
    first, *lines = FILE.read_text(encoding="utf-8").splitlines()
    return first.split()[-1], dict(line.split(" ", 1) for line in lines)


def of_real():
    """The same of the CuPy that is installed."""
    import cupy
    import cupyx.scipy.special

    owners, found = {}, {}
    for place in PLACES:                                         # all of them first: some names appear when asked for
        first, *parts = place.split(".")
        owners[place] = functools.reduce(getattr, parts, {"cupy": cupy, "cupyx": cupyx}[first])
    for place, owner in owners.items():
        found.update({f"{place}.{name}": kind for name, kind in _names_in(owner, place, cupy.ufunc)})
    return cupy.__version__, found


def _names_in(owner, place, ufunc):
    is_class = inspect.isclass(owner)
    for name in dir(owner):
        special = name.startswith("__") and is_class and name not in dir(object)
        if name.startswith("_") and not special:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = getattr(owner, name)
            except Exception:
                continue
            kind = _kind(name, value, is_class, ufunc)
        if kind != "value" or place != "cupy.cuda.runtime":         # which is hundreds of constants
            yield name, kind


def _kind(name, value, is_class, ufunc):
    if isinstance(value, types.ModuleType):
        return "module"
    if not is_class and value is getattr(np, name, ufunc):
        return "numpy"
    if isinstance(value, ufunc):
        return f"ufunc {value.nin} {value.nout}"
    if inspect.isclass(value):
        return "class"
    if not callable(value):
        return "attribute" if is_class else "value"
    return f"( {_parameters(value, is_class)}".rstrip()


def _parameters(function, is_method):
    try:
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
    except (TypeError, ValueError):                              # Cython writes the signature into the documentation
        line = re.match(r"[\w.]+\((.*)\)", (function.__doc__ or "").strip().partition("\n")[0])
        if line is None:
            return "*args **kwargs"
        words = [part.strip() for part in line[1].split(",")][is_method:]
        return " ".join(re.sub(r"=.*", "=", word).split(" ")[-1] for word in words)
    text, star = [], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            text.append(f"*{p.name}")
            star = True
        elif p.kind is p.VAR_KEYWORD:
            text.append(f"**{p.name}")
        else:
            if p.kind is p.KEYWORD_ONLY and not star:
                text.append("*")
                star = True
            text.append(p.name if p.default is p.empty else f"{p.name}=")
    return " ".join(text)


@functools.cache
def signature(kind):
    """The inspect.Signature of a line's parameters."""
    parameters, keyword_only = [], False
    for word in kind.split()[1:]:
        name = word.strip("*").rstrip("=")
        if word.startswith("**"):
            how = inspect.Parameter.VAR_KEYWORD
        elif word == "*":
            keyword_only = True
            continue
        elif word.startswith("*"):
            how, keyword_only = inspect.Parameter.VAR_POSITIONAL, True
        else:
            how = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, how, default=... if word.endswith("=") else inspect.Parameter.empty))
    return inspect.Signature(parameters)


if __name__ == "__main__":
    version, names = of_real()
    print("# the public names of CuPy", version)
    for name, kind in names.items():
        print(name, kind)
