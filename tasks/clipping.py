"""Gradient clipping shown: the cliff of Pascanu et al. 2013 (section 2.3, Figure 6), and a table on a real task.

    python tasks/clipping.py                          both, 3 minutes
    python tasks/clipping.py cliff                    the picture alone, 3 seconds
    python tasks/clipping.py table --lr 0.4           the table at another learning rate
    python tasks/clipping.py --steps 50               a quick look: which runs diverge, 15 seconds

The cliff: one recurrent unit, x_t = w sigma(x_{t-1}) + b, whose loss over (w, b) has a wall. Gradient descent from one
start, three times: without clipping the gradient on the wall throws it off to where the loss is flat; clipped by norm
or by value it stays by the wall and follows it down. The picture has fixed settings and is computed on the CPU in
float64; all flags but --out, --threads and --quiet are the table's.

The table: the adding problem under plain SGD. For each of --seeds seeds three runs that share all but the clipping:
data, first weights, batches. A run has diverged when its loss is not finite or exceeds 10 times its first value; it
ends there and is counted. It has learnt when its test MSE at the end is below half of that of always predicting 1.

Defaults: LSTM, S = 20, 16 units, batches of 20, learning rate 0.5, 2,000 steps, seeds 0 to 9, norm clipped at 1, values
at 0.3. Everything else is as in tasks/adding.py (orthogonal gates, forget bias 1).

Expect: without clipping 7 of 10 runs diverge within 8 steps and 1 learns; by value and by norm none diverges and all
learn (median test MSE 0.007 and 0.009, always predicting 1: 0.167). A run folder (runs/clipping/TIME) with config.json,
cliff.png, cliff.csv, losses.png, log.csv (every run's losses and gradient norms), table.md, result.json, and runs.json,
in which each run is kept as soon as it is done (a table that was stopped is made anew: there is no --resume).
"""

import sys
import time

from minigrad.data import Batches
from tasks import frame
from tasks.clipping_cliff import cliff
from tasks.clipping_table import build, generate, markdown, table
from tasks.frame import UsageError, number, whole
from tasks.frame.flags import SHARED_DEFAULTS, given_on
from tasks.frame.run_folder import open_run_folder, write_json

DEFAULTS = {
    **SHARED_DEFAULTS, "model": "lstm", "length": 20, "window": 10, "hidden": 16, "seeds": 10, "train_size": 20_000,
    "test_size": 2_000, "batch_size": 20, "optimizer": "sgd", "lr": 0.5, "clip_norm": 1.0, "clip_value": 0.3,
    "log_every": 20, "steps": 2_000}
PARTS = ("cliff", "table")


def parser_of(parts):
    """The parser of the whole task, or of one part: the cliff has no flags but where to write."""
    parser = frame.OneLineParser(" ".join(["python tasks/clipping.py", *(parts if len(parts) == 1 else [])]), __doc__)
    add = parser.add_argument
    add("--out", help="run folder (default runs/clipping/TIME); a non-empty one is refused")
    add("--threads", type=whole(1), help="BLAS threads (default 1)")
    add("--quiet", action="store_true", default=None, help="print results and errors only")
    if "table" in parts:
        add("--device", choices=["cpu", "gpu", "auto"], help="default cpu")
        add("--seed", type=whole(0), help="the first one (default 0)")
        add("--seeds", type=whole(1), help="runs of each way of clipping (default 10)")
        add("--steps", type=whole(1), help="iterations (default 2,000)")
        add("--batch-size", type=whole(1), help="default 20")
        add("--lr", type=number(0), help="learning rate (default 0.5)")
        add("--clip-norm", type=number(0, open_low=True), help="threshold of the global norm (default 1)")
        add("--clip-value", type=number(0, open_low=True), help="threshold of every entry (default 0.3)")
        add("--dtype", choices=["float32", "float64"], help="default float32")
        add("--model", choices=["rra", "lstm"], help="default lstm")
        add("-S", "--length", type=whole(2), help="steps of a sequence (default 20)")
        add("-K", "--window", type=whole(0), help="rra: states attended to (default 10)")
        add("--hidden", type=whole(1), help="units (default 16)")
        add("--train-size", type=whole(1), help="default 20,000")
        add("--test-size", type=whole(1), help="default 2,000")
        add("--log-every", type=whole(1), help="iterations a row of log.csv (default 20)")
    return parser


def main(argv):
    parts = (argv[0],) if argv[:1] in ([part] for part in PARTS) else PARTS
    given = given_on(parser_of(parts), argv[1:] if len(parts) == 1 else argv)
    settings = {**DEFAULTS, **given}
    if "window" in given and settings["model"] != "rra":
        raise UsageError(f"--window has no meaning with {settings['model']}; it is of rra")
    with frame.blas_threads(settings["threads"]):
        frame.device_of(settings)                   # before anything is written
        if "table" in parts:
            try:                                    # nor is anything written for settings that do not fit
                build(settings, settings["seed"])
                Batches(generate(settings, settings["seed"])[0], settings["batch_size"], seed=settings["seed"])
            except ValueError as error:
                raise UsageError(str(error)) from error
        out, hold = open_run_folder("clipping", settings)
        frame.say(settings, f"writing to {out}")
        result, began = {}, time.monotonic()
        if "cliff" in parts:
            result["cliff"] = cliff(out)
        if "table" in parts:
            result["table"] = table(out, settings)
            print(markdown(result["table"]), end="")
        write_json(out / "result.json", {**result, "seconds": round(time.monotonic() - began, 1)})
        del hold
    frame.say(settings, f"figures: {', '.join(str(path) for path in sorted(out.glob('*.png')))}")


if __name__ == "__main__":
    sys.exit(frame.exit_status(main))
