"""What tasks/bench.py --device gpu shows: text, printed row by row, and a figure; and the text of --estimate."""

from tasks.bench.gpu_costs import epoch_of
from tasks.frame.figures import COLOURS, new_figure, save

SIDES = {"minigrad": COLOURS[0], "minigrad's LSTM": "#9dbbe0", "PyTorch eager": COLOURS[1], "torch.compile": COLOURS[3],
         "cuDNN float32": COLOURS[2], "cuDNN, TF32 allowed": COLOURS[4]}


# ---- the text --------------------------------------------------------------------------------------------

def head_of(report):
    """The card, how it is measured, its rates, and the table's head."""
    card, rates = report["environment"], report["rates"]
    kernels = "minigrad's kernels are on" if card["kernels"] else "MINIGRAD_KERNELS=0: plain CuPy, without the kernels"
    lines = ["{card}, {multiprocessors} multiprocessors, {memory:.0f} GiB; CUDA {cuda_runtime}, driver {cuda_driver}; "
             "CuPy {cupy}; {other}".format(**card, memory=card["memory_bytes"] / 2**30,
                                           other=card.get("torch", "no PyTorch")),
             f"float32, dropout off; {kernels}; the median of {report['settings']['repeats']} calls (fewer of slow "
             "ones), by CUDA events", "CuPy's and PyTorch's work runs on the legacy default stream both"]
    if card["variables"]:
        lines.append("set in the environment, and the figures may be others for it: " + ", ".join(
            f"{name}={value}" for name, value in card["variables"].items()))
    if rates:
        lines.append("rates: copy {copy_tb_s:.2f} TB/s (read + written), float32 product {product_tflop_s:.1f} "
                     "TFLOP/s, a launch {kernel_us:.1f} us (a kernel of minigrad's), {dot_us:.1f} us (cupy.dot)".format(
                         **rates))
    lines += ["floor: the larger of bytes / copy rate and flops / product's rate; ratio: minigrad's time to a side's",
              "", f"{'':52}{'median ms':>11}{'least':>10}{'spread':>8}{'ratio':>8}{'at most':>9}  verdict"]
    return "\n".join(lines)


def sides_of(report, name, first):
    """A row of the bench: its size, and a line for each of its sides behind the first so many of the table."""
    lines = [f"{name}: {report['sizes'][name]}", *(side_line(row) for row in report["table"][first:])]
    return "\n".join(lines)


def floor_of(report, name):
    """[line]: a row's floor and launches, of the MNIST step the epoch."""
    lines, floor = [], report["floors"][name]
    if floor["ms"] is not None:
        what = f"floor ({floor['bytes'] / 1e9:.3g} GB, {floor['flops'] / 1e9:.4g} GFLOP)"
        lines.append(f"  {what:50}{floor['ms']:11.3f}{'':18}{judgement(floor)}")
    if floor["launches_ms"] is not None:
        us = 1e3 * floor["launches_ms"] / floor["launches"]
        lines.append(f"  {floor['launches']:,} launches of about {us:.1f} us: {floor['launches_ms']:.3f} ms")
    if "epoch" in floor:
        lines.append("  an epoch of {steps:,} such steps: {seconds:.1f} s, at most {at_most}: {verdict}".format(
            **floor["epoch"]))
    return lines


def side_line(row):
    name = row["side"] + (f" ({row['way']})" if row["way"] else "")
    line = f"  {name:50}{row['ms']:11.3f}{row['min_ms']:10.3f}{100 * row['spread']:6.0f} %"
    return (line + judgement(row)).rstrip()


def judgement(row):
    """The columns ratio, at most, verdict; empty for a way that is not its side's quickest."""
    if "ratio" not in row:
        return ""
    at_most = "" if row["at_most"] is None else f"{row['at_most']:.2f}"
    return f"{row['ratio']:8.2f}{at_most:>9}  {row['verdict']}"


def foot_of(report):
    """What was left out, what failed, what differs."""
    return "\n".join(dict.fromkeys([*report["notes"], *report["differing"]])) or "nothing was left out"


def estimate_text(rows, settings, assumed):
    """The table of --estimate."""
    lines = ["ESTIMATES from assumed rates, not measurements: {:g} TB/s copied, {:g} TFLOP/s of a float32 product, "
             "{:g} us a launch from Python".format(*assumed),
             "floor: the larger of bytes and flops at these rates; estimate: the larger of the floor and the launches",
             f"{'':16}{'size':34}{'GB':>9}{'GFLOP':>11}{'launches':>10}{'floor, ms':>11}{'launches, ms':>14}"
             f"{'estimate, ms':>14}"]
    for row in rows:
        size = " ".join(str(size).strip("()").replace(" ", "") for size in row["size"])
        lines.append(f"{row['layer']:16}{size:34}{row['bytes'] / 1e9:9.4f}{row['flops'] / 1e9:11.3f}"
                     f"{row['launches']:10,}{row['floor_ms']:11.3f}{row['launches_ms']:14.3f}{row['ms']:14.3f}")
        if row["layer"] == "MNIST step":
            lines.append("{:16}an epoch of {:,} such steps: {:.1f} s".format("", *epoch_of(settings, row["ms"])))
    return "\n".join(lines)


# ---- the figure ------------------------------------------------------------------------------------------

def draw(report, path):
    """A bar a row and side, each side at its quickest way; the floor of a row is a black mark."""
    bars, rows = {}, list(report["sizes"])
    for row in sorted(report["table"], key=lambda row: rows.index(row["layer"])):
        key = row["layer"], row["side"]
        bars[key] = min(row["ms"], bars.get(key, row["ms"]))
    figure, axes = new_figure(8.5, max(3.0, 1.6 + 0.28 * len(bars)))
    names = [f"{layer}, {side}" for layer, side in bars]
    drawn = axes.barh(range(len(bars)), bars.values(), color=[SIDES.get(side, COLOURS[5]) for _, side in bars])
    axes.bar_label(drawn, [f"{ms:.3g}" for ms in bars.values()], padding=3, fontsize=8)
    floors = [(report["floors"][layer]["ms"], n) for n, (layer, _) in enumerate(bars)
              if report["floors"].get(layer, {}).get("ms")]
    if floors:
        axes.plot(*zip(*floors), "|", color="black", markersize=13, markeredgewidth=2, label="floor")
        axes.legend(frameon=False, fontsize=8, loc="best")
    if bars:
        axes.set_xscale("log")
    axes.set_yticks(range(len(bars)), labels=names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("median ms (log scale); the sides of a row do the same work")
    axes.set_title(f"minigrad on {report['environment']['card']}, float32", fontsize=10)
    save(figure, path)
