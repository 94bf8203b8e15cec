"""What the bench shows of a GPU: text, printed row by row, and a figure."""

from tasks.frame.figures import COLOURS, new_figure, save

SIDES = {"minigrad": COLOURS[0], "minigrad's LSTM": "#9dbbe0", "PyTorch eager": COLOURS[1], "torch.compile": COLOURS[3],
         "cuDNN float32": COLOURS[2], "floor": "#222222"}


def head_of(report):
    """The card, how it is measured, its rates, and the table's head."""
    card, rates = report["environment"], report["rates"]
    kernels = "minigrad's kernels are on" if card["kernels"] else "MINIGRAD_KERNELS=0: plain CuPy, without the kernels"
    lines = ["{card}, {multiprocessors} multiprocessors, {memory:.0f} GiB; CUDA {cuda_runtime}, driver {cuda_driver}; "
             "CuPy {cupy}; {torch}".format(**card, memory=card["memory_bytes"] / 2**30),
             f"float32, dropout off; {kernels}; the median of {report['settings']['repeats']} calls (fewer of slow "
             "ones), by CUDA events on the legacy default stream"]
    if card["variables"]:
        lines.append("set in the environment, which may change the figures: " + ", ".join(
            f"{name}={value}" for name, value in card["variables"].items()))
    if rates:
        lines.append("rates: copy {copy_tb_s:.2f} TB/s (read + written), float32 product {product_tflop_s:.1f} "
                     "TFLOP/s, a launch {kernel_us:.1f} us (a kernel of minigrad's), {dot_us:.1f} us (cupy.dot)".format(
                         **rates))
    lines += ["floor: the larger of bytes / copy rate and flops / product's rate; ratio: minigrad's time to a side's",
              "", f"{'':52}{'median ms':>11}{'least':>10}{'spread':>8}{'ratio':>8}{'at most':>9}  verdict"]
    return "\n".join(lines)


def row_text(report, name, lines):
    """A row of the bench: its size, and a line for each of its sides."""
    text = [f"{name}: {report['sizes'][name]}"]
    for line in lines:
        side = line["side"] + (f" ({line['way']})" if line["way"] else "")
        judged = ""
        if "ratio" in line:
            at_most = "" if line["at_most"] is None else f"{line['at_most']:.2f}"
            judged = f"{line['ratio']:8.2f}{at_most:>9}  {line['verdict']}"
        text.append(f"  {side:50}{line['ms']:11.3f}{line['min_ms']:10.3f}{100 * line['spread']:6.0f} %{judged}")
        if "epoch" in line:
            text.append("  an epoch of them: {seconds:.1f} s, at most {at_most}: {verdict}".format(**line["epoch"]))
    return "\n".join([*text, ""])


def draw(report, path):
    """A bar for each row and side, each side at its fastest way."""
    bars, rows = {}, list(report["sizes"])
    for row in sorted(report["table"], key=lambda row: rows.index(row["layer"])):
        key = row["layer"], row["side"]
        bars[key] = min(row["ms"], bars.get(key, row["ms"]))
    figure, axes = new_figure(8.5, max(3.0, 1.6 + 0.28 * len(bars)))
    drawn = axes.barh(range(len(bars)), bars.values(), color=[SIDES.get(side, COLOURS[5]) for _, side in bars])
    axes.bar_label(drawn, [f"{ms:.3g}" for ms in bars.values()], padding=3, fontsize=8)
    if bars:
        axes.set_xscale("log")
    axes.set_yticks(range(len(bars)), labels=[f"{layer}, {side}" for layer, side in bars])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("median ms (log scale); the sides of a row do the same work")
    axes.set_title(f"minigrad on {report['environment']['card']}, float32", fontsize=10)
    save(figure, path)
