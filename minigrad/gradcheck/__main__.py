"""Check a layer's gradients from a shell.

    python -m minigrad.gradcheck minigrad.layers:RRALSTM --shape 3,7,4 --set d=4 --set h=5 --set K=3
    python -m minigrad.gradcheck my_layers.py:Gate --shape 8,4 --set d=4 --plot gate.png

Prints the table of gradcheck. Exit status: 0 every gradient agrees, 1 one is wrong, 2 bad usage, or the layer raises,
130 interrupted.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path

import numpy as np

from minigrad.gradcheck import gradcheck
from minigrad.tree import tree_map


class UsageError(ValueError):
    """Bad usage: one line, exit status 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse(argv):
    """The arguments. Raises UsageError."""
    parser = Parser(prog="python -m minigrad.gradcheck", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", help="module:Class or path/to/file.py:Class")
    parser.add_argument("--shape", action="append", type=shape, default=[], metavar="3,7,4",
                        help="of an input; once for each positional array of forward")
    parser.add_argument("--ids", type=count, metavar="V", help="the inputs are integers in 0 ... V-1")
    parser.add_argument("--positive", action="store_true", help="inputs from 0.1 to 1.1, for logarithms and roots")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="NAME=VALUE",
                        help="a constructor's argument")
    parser.add_argument("--keyword", action="append", type=setting, default=[], metavar="NAME=VALUE",
                        help="a keyword of forward, causal=True for example")
    parser.add_argument("--mask", action="store_true", help="with a random mask over the first two axes of the input")
    parser.add_argument("--state", action="store_true", help="from a random initial state (recurrent layers)")
    parser.add_argument("--rng", type=int, metavar="SEED", help="as in training: hand forward a generator")
    parser.add_argument("--mode", choices=["full", "direction"], default="full")
    for name, default in (("eps", 1e-5), ("rtol", 1e-6), ("atol", 1e-8)):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"as in gradcheck; {default:g} by default")
    parser.add_argument("--seed", type=natural, default=0, help="of inputs, initialisation and the check")
    parser.add_argument("--plot", metavar="FILE.png", help="draw where analytic and numeric differ")
    parser.add_argument("--traceback", action="store_true", help="if the layer raises, with the traceback")
    arguments = parser.parse_args(argv)
    if arguments.plot and arguments.mode == "direction":
        parser.error("--plot draws entry by entry; expected --mode full")
    if arguments.plot and not arguments.plot.lower().endswith(".png"):
        parser.error(f"--plot {arguments.plot}: it draws PNG; expected a name that ends in .png")
    if arguments.ids and arguments.positive:
        parser.error("--ids are integers; expected them without --positive")
    return arguments


def natural(text, lowest=0):
    if not text.isdecimal() or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, {lowest} or larger")
    return int(text)


def count(text):
    return natural(text, 1)


def shape(text):
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = (-1,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected positive sizes such as 3,7,4")
    return sizes


def setting(text):
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value                                           # a bare word is a string


def find_layer(target):
    """The class that `module:Class` or `file.py:Class` names. Raises UsageError."""
    place, _, name = target.rpartition(":")
    if not place:
        raise UsageError(f"layer is {target!r}; expected module:Class or path/to/file.py:Class")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"layer's file {place} is not there")
    try:
        module = import_module(place)
    except Exception as error:                                       # whatever the author's module does
        raise UsageError(f"layer's module {place} cannot be imported ({type(error).__name__}: {error})") from error
    if not inspect.isclass(getattr(module, name, None)):
        public = [name for name, value in vars(module).items() if inspect.isclass(value) and not name.startswith("_")]
        raise UsageError(f"{place} has no class {name}; it has {', '.join(public)}")
    return getattr(module, name)


def import_module(place):
    """The module of that name or in that file; it can import modules from its own folder."""
    in_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent if in_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not in_file:
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"checked_{Path(place).stem}", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_layer(target, settings, seed):
    """The layer itself; a namespace of functions (minigrad.functional:softmax) itself."""
    if isinstance(inspect.getattr_static(target, "forward", None), staticmethod):
        if settings:
            raise UsageError(f"{target.__name__} is a namespace of functions and takes no --set")
        return target
    takes = inspect.signature(target.__init__).parameters
    given = {"rng": np.random.default_rng(seed), "dtype": "float64"}
    try:
        return target(**{**{name: value for name, value in given.items() if name in takes}, **settings})
    except TypeError as error:
        if error.__traceback__.tb_next is None:                      # raised by the call, not by what it called
            raise UsageError(f"{target.__name__} cannot be made: {error}") from error
        raise


def make_inputs(arguments, layer):
    """(inputs, keywords) as the flags ask for them."""
    random = np.random.default_rng(arguments.seed)
    if not arguments.shape:
        raise UsageError("--shape is missing; expected one for each positional array of forward, such as 3,7,4")
    if arguments.ids:
        inputs = tuple(random.integers(0, arguments.ids, sizes) for sizes in arguments.shape)
    elif arguments.positive:
        inputs = tuple(random.uniform(0.1, 1.1, sizes) for sizes in arguments.shape)
    else:
        inputs = tuple(random.standard_normal(sizes) for sizes in arguments.shape)
    keywords = dict(arguments.keyword)
    if arguments.mask:
        mask = keywords["mask"] = random.random(arguments.shape[0][:2]) < 0.7
        if mask.ndim == 2 and len(mask) > 1:
            mask[0, 0], mask[-1] = True, False                       # a sample without a real step
    if arguments.rng is not None:
        keywords["rng"] = arguments.rng
    if arguments.state:
        if not getattr(layer, "recurrent", False):
            raise UsageError(f"--state: {type(layer).__name__} is not a recurrent layer")
        (_, state), _ = layer.forward(*inputs)
        keywords["state"] = tree_map(
            lambda a: random.standard_normal(a.shape) if a.dtype.kind == "f" else a, state)
    return inputs, keywords


def check(arguments):
    """The report on the layer that the arguments name, printed and, if asked for, plotted."""
    layer = make_layer(find_layer(arguments.layer), dict(arguments.set), arguments.seed)
    inputs, keywords = make_inputs(arguments, layer)
    report = gradcheck(layer, inputs, keywords, mode=arguments.mode, eps=arguments.eps, rtol=arguments.rtol,
                       atol=arguments.atol, seed=arguments.seed)
    print(report)
    if arguments.plot and report.rows:
        report.plot(arguments.plot)
    return report


def describe(error):
    """One line; for an error from the layer with its type and the line that raised it."""
    text = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"


def main(argv=None):
    arguments = None
    try:
        arguments = parse(argv)
        return 0 if check(arguments).ok else 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:                                       # bad usage, or the layer's own error
        if arguments and arguments.traceback:
            traceback.print_exc()
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
