"""The bench's flags and sizes."""

import argparse
import os
from pathlib import Path

from minigrad.backend import require_working
from tasks.frame import OneLineParser, number, whole
from tasks.frame.run_folder import UsageError

FULL = {"repeats": 15, "pause": 0.25, "cost_repeats": 5,
        "batch_size": 50, "length": 100, "hidden": 128, "window": 10, "srupp_size": (128, 8, 256, 64),
        "over_S": [100, 200, 400, 800, 1600, 3200], "over_B": [10, 20, 40, 80, 160], "over_K": [5, 10, 20, 40, 80],
        "over_L": [128, 256, 512, 1024, 2048, 4096], "over_L_batch": 2, "srupp_window": 128,
        "step_bytes": 1000, "step_repeats": 5, "step_layers": 4, "step_window": 64,
        "tsdae_size": (64, 24, 128, 4, 2, 8000), "tsdae_encoded": 512,       # B, L, d, heads, layers, vocabulary
        "imdb_size": (16, 256, 128, 5, 10_002)}                              # B, L, d = h, K, vocabulary
QUICK = {"repeats": 3, "pause": 0.01, "cost_repeats": 3,
         "batch_size": 4, "length": 12, "hidden": 16, "window": 3, "srupp_size": (12, 2, 16, 4),
         "over_S": [10, 20, 40], "over_B": [2, 4, 8], "over_K": [2, 4, 8],
         "over_L": [8, 16, 32, 160], "over_L_batch": 2, "srupp_window": 8,
         "step_bytes": 60, "step_repeats": 2, "step_layers": 2, "step_window": 8,
         "tsdae_size": (4, 10, 16, 2, 2, 40), "tsdae_encoded": 20, "imdb_size": (4, 12, 16, 3, 40)}
FULL_GPU = {"repeats": 30, "seconds": None, "window": 10,
            "sru_size": (1024, 32, 1024), "lstm_size": (50, 784, 1, 256),              # L, B, d; B, T, d, h
            "srupp_size": (512, 16, 1024, 256), "attention_size": (8, 8, 512, 512),    # L, B, d, d'; B, heads, L, d
            "tsdae_size": (64, 32, 512, 8, 4, 30_000), "mnist_size": (50, 784, 256),   # as on the CPU; B, T, h
            "copy_bytes": 1 << 30, "matrix": 8192, "launch_calls": 1000}
QUICK_GPU = {"repeats": 3, "seconds": None, "window": 3,
             "sru_size": (12, 2, 16), "lstm_size": (4, 12, 1, 16), "srupp_size": (12, 2, 16, 4),
             "attention_size": (2, 2, 6, 8), "tsdae_size": (4, 10, 16, 2, 2, 40), "mnist_size": (4, 9, 16),
             "copy_bytes": 1 << 16, "matrix": 32, "launch_calls": 5}
PARTS = {"cpu": ("rra", "lstm", "rnns", "srupp", "tsdae", "imdb"),
         "gpu": ("sru", "lstm", "rra", "srupp", "attention", "tsdae", "mnist")}
NAMES = f"{', '.join(PARTS['cpu'])} on the CPU, {', '.join(PARTS['gpu'])} on a GPU"
ONLY_ON = {"cpu": ("rows_only", "batch_size", "length", "hidden", "window", "srupp_size"), "gpu": ("seconds",)}


def parse(argv, description=None):
    """The settings of this measurement; see `--help`. Raises UsageError, and DeviceError where the GPU is not there."""
    given = {key: value for key, value in vars(parser_of(description).parse_args(argv)).items() if value is not None}
    for flag in ("json", "out"):
        path = Path(given.get(flag) or ".")
        if flag in given and ((path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK)):
            raise UsageError(f"--{flag} {given[flag]!r} cannot be written; expected a file in an existing folder")
    device = require_working(given.get("device", "cpu"))
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    for key in ONLY_ON[other]:
        if key in given:
            raise UsageError(f"--{key.replace('_', '-')} has a meaning with --device {other} only; the device is the "
                             f"{device}")
    for name in given.get("only", ()):
        if name not in PARTS[device]:
            raise UsageError(f"--only has {name!r}, which is not measured with --device {device}; expected names among "
                             f"{', '.join(PARTS[device])}")
    sizes = {"cpu": (FULL, QUICK), "gpu": (FULL_GPU, QUICK_GPU)}[device]["quick" in given]
    only = tuple(name for name in PARTS[device] if name in given.get("only", PARTS[device]))
    return {"json": None, "out": None, "quick": False, "rows_only": False, **sizes, **given, "device": device,
            "only": only}


def parser_of(description):
    parser = OneLineParser(prog="python tasks/bench", description=description, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "gpu", "auto"], help="default cpu")
    parser.add_argument("--only", type=names, metavar="NAMES", help=f"some of {NAMES} (default: all)")
    parser.add_argument("--repeats", type=whole(1), help="calls of a side, at least (15); on a GPU at most (30)")
    parser.add_argument("--quick", action="store_true", default=None, help="small sizes and few repeats")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    parser.add_argument("--out", metavar="FILE", help="draw the table, and cost over L, as PNG")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--rows-only", action="store_true", default=None, help="no tables of cost, nothing step by step")
    cpu.add_argument("--batch-size", type=whole(1), help="of RRALSTM, LSTM, IRNN, RWA and URNN (default 50)")
    cpu.add_argument("-S", "--length", type=whole(2), help="their steps in a sequence (default 100)")
    cpu.add_argument("--hidden", type=whole(1), help="their units (default 128)")
    cpu.add_argument("-K", "--window", type=whole(1), help="states that RRALSTM attends to (default 10)")
    cpu.add_argument("--srupp-size", type=srupp_size, metavar="L,B,D,P",
                     help="SRU++: steps, batch, width d = h, projection d' (default 128,8,256,64)")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--seconds", type=number(0), metavar="N", help="begin nothing more after N seconds")
    return parser


def names(text):
    """An argparse type: names of parts, of either device, separated by commas."""
    words = tuple(text.replace(" ", "").split(","))
    if not set(words) <= {*PARTS["cpu"], *PARTS["gpu"]}:
        raise argparse.ArgumentTypeError(f"{text!r}; expected names among {NAMES}")
    return words


def srupp_size(text):
    """An argparse type: L,B,D,P."""
    words = text.replace(" ", "").split(",")
    if len(words) != 4 or not all(word.isdecimal() and int(word) > 0 for word in words) or int(words[0]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; expected four whole numbers L,B,D,P, L at least 2")
    return tuple(map(int, words))
