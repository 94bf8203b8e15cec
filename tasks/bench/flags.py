"""The flags of tasks/bench.py, and its sizes on the CPU; those on a GPU: bench_gpu_costs.py."""

import argparse
import os
from pathlib import Path

from minigrad.backend import require_working
from tasks.bench import gpu_costs as bench_gpu_costs
from tasks.bench.gpu_costs import FULL_GPU, QUICK_GPU
from tasks.frame.common import OneLineParser, number, whole
from tasks.frame.run_folder import UsageError

PARTS = ("rra", "lstm", "rnns", "srupp", "tsdae", "imdb")
FULL = {"only": PARTS, "repeats": 15, "pause": 0.25, "cost_repeats": 5,
        "batch_size": 50, "length": 100, "hidden": 128, "window": 10, "srupp_size": (128, 8, 256, 64),
        "over_S": [100, 200, 400, 800, 1600, 3200], "over_B": [10, 20, 40, 80, 160], "over_K": [5, 10, 20, 40, 80],
        "over_L": [128, 256, 512, 1024, 2048, 4096], "over_L_batch": 2, "srupp_window": 128,
        "step_bytes": 1000, "step_repeats": 5, "step_layers": 4, "step_window": 64,
        "tsdae_size": (64, 24, 128, 4, 2, 8000), "tsdae_encoded": 512,        # B, L, d, heads, layers, vocabulary
        "imdb_size": (16, 256, 128, 5, 10_002)}                              # B, L, d = h, K, vocabulary
QUICK = {"only": PARTS, "repeats": 3, "pause": 0.01, "cost_repeats": 3,
         "batch_size": 4, "length": 12, "hidden": 16, "window": 3, "srupp_size": (12, 2, 16, 4),
         "over_S": [10, 20, 40], "over_B": [2, 4, 8], "over_K": [2, 4, 8],
         "over_L": [8, 16, 32, 160], "over_L_batch": 2, "srupp_window": 8,
         "step_bytes": 60, "step_repeats": 2, "step_layers": 2, "step_window": 8,
         "tsdae_size": (4, 10, 16, 2, 2, 40), "tsdae_encoded": 20, "imdb_size": (4, 12, 16, 3, 40)}
PARTS_OF = {"cpu": PARTS, "gpu": bench_gpu_costs.PARTS}
NAMES = f"{', '.join(PARTS)} on the CPU, {', '.join(bench_gpu_costs.PARTS)} on a GPU"
ONLY_ON = {"cpu": ("rows_only", "batch_size", "length", "hidden", "window", "srupp_size"), "gpu": ("seconds",)}
NOT_ESTIMATED = ("repeats", "seconds", "out")


def parse(argv, description):
    """The settings of this measurement; see `--help`. Raises UsageError, and DeviceError where the GPU is not there."""
    given = {key: value for key, value in vars(parser_of(description).parse_args(argv)).items() if value is not None}
    for flag in ("json", "out"):
        path = Path(given.get(flag) or ".")
        if flag in given and ((path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK)):
            raise UsageError(f"--{flag} {given[flag]!r} cannot be written; expected a file in a folder that is there")
    check_estimate(given)
    device = "gpu" if "estimate" in given else require_working(given.get("device", "cpu"))
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    for key in ONLY_ON[other]:
        if key in given:
            raise UsageError(f"{flag_of(key)} has a meaning with --device {other} only; the device is the {device}")
    usual = {"cpu": {"rows_only": False, **(QUICK if "quick" in given else FULL)},
             "gpu": QUICK_GPU if "quick" in given else FULL_GPU}[device]
    settings = {"json": None, "out": None, "quick": False, "estimate": False, "rates": None, **usual, **given,
                "device": device}
    return {**settings, "only": parts_of(settings["only"], device)}


def parser_of(description):
    parser = OneLineParser(prog="python tasks/bench.py", description=description, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "gpu", "auto"], help="default cpu")
    parser.add_argument("--only", type=names, metavar="NAMES", help=f"some of {NAMES} (default: all)")
    parser.add_argument("--repeats", type=whole(1), help="calls a side, at least (default 15); on a GPU 30, at most")
    parser.add_argument("--quick", action="store_true", default=None, help="small sizes and few repeats")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    parser.add_argument("--out", metavar="FILE", help="draw the table there, as PNG, and cost over L beside it")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--rows-only", action="store_true", default=None, help="no tables of cost, nothing step by step")
    cpu.add_argument("--batch-size", type=whole(1), help="of RRALSTM, LSTM, IRNN, RWA and URNN (default 50)")
    cpu.add_argument("-S", "--length", type=whole(2), help="their steps of a sequence (default 100)")
    cpu.add_argument("--hidden", type=whole(1), help="their units (default 128)")
    cpu.add_argument("-K", "--window", type=whole(1), help="states that RRALSTM attends to (default 10)")
    cpu.add_argument("--srupp-size", type=srupp_size, metavar="L,B,D,P",
                     help="SRU++: steps, batch, width d = h, projection d' (default 128,8,256,64)")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--seconds", type=number(0), metavar="N", help="begin nothing more after N seconds")
    gpu.add_argument("--estimate", action="store_true", default=None,
                     help="without a GPU: what each row costs by its sizes, at assumed rates")
    gpu.add_argument("--rates", type=assumed, metavar="TB/S,TFLOP/S,US",
                     help="of --estimate: copy, float32 product, microseconds a launch (default "
                          f"{','.join(f'{rate:g}' for rate in bench_gpu_costs.ASSUMED)})")
    return parser


def check_estimate(given):
    """Raise UsageError for flags that --estimate has no use for, or that only it has."""
    if "estimate" not in given:
        if "rates" in given:
            raise UsageError("--rates has a meaning with --estimate only")
        return
    if given.get("device") == "cpu":
        raise UsageError("--estimate is of the rows of --device gpu; --device cpu was given")
    for key in NOT_ESTIMATED:
        if key in given:
            raise UsageError(f"{flag_of(key)} has no meaning with --estimate, which measures nothing")


def flag_of(key):
    return "--" + key.replace("_", "-")


def names(text):
    """An argparse type: names of parts, of either device, with commas between them."""
    words = tuple(text.replace(" ", "").split(","))
    if not set(words) <= {*PARTS_OF["cpu"], *PARTS_OF["gpu"]}:
        raise argparse.ArgumentTypeError(f"{text!r}; expected names among {NAMES}")
    return words


def parts_of(only, device):
    """The names in the order in which they are measured. Raises UsageError for one of the other device."""
    there = PARTS_OF[device]
    for name in only:
        if name not in there:
            raise UsageError(f"--only has {name!r}, which is not measured with --device {device}; expected names among "
                             f"{', '.join(there)}")
    return tuple(name for name in there if name in only)


def srupp_size(text):
    """An argparse type: L,B,D,P."""
    words = text.replace(" ", "").split(",")
    if len(words) != 4 or not all(word.isdecimal() and int(word) > 0 for word in words) or int(words[0]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; expected four whole numbers L,B,D,P, L at least 2")
    return tuple(map(int, words))


def assumed(text):
    """An argparse type: three numbers above 0."""
    words = text.split(",")
    if len(words) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}; expected three numbers TB/S,TFLOP/S,US")
    return tuple(number(0, open_low=True)(word) for word in words)
