"""What the bench shows of the CPU: the report as text, and as a figure."""

import itertools
import textwrap

from tasks.bench.measure import STRAIGHT
from tasks.bench.srupp import SAME
from tasks.frame.figures import COLOURS, new_figure, save

WHAT = "forward + backward (TSDAE step: and AdamW; IMDB step: and Adadelta; TSDAE encode: forward)"


def text_of(report):
    """The report as lines of text."""
    lines = [f"{name}: {size}" for name, size in report["sizes"].items()]
    lines += [f"float32, {WHAT}, best of at least {report['settings']['repeats']} calls", *report["notes"],
              *report["differing"], "", f"{'':50}{'ms':>9}  {'threads':8}{'ratio':>6}{'at most':>9}{'aim':>6}  verdict"]
    lines += [row_line(row) for row in report["table"]]
    rates = [f"{row['side']} {row['per_second']:,.0f}" for row in report["table"] if "per_second" in row]
    lines += ["", f"TSDAE encode, sentences a second: {', '.join(rates)}"] if rates else []
    lines.append("")
    for layer, memory in report["memory"].items():
        lines.append(f"{layer}: bytes a step, sample and unit: cache {memory['cache_bytes']:.1f}, "
                     f"peak of forward + backward {memory['peak_bytes']:.1f}")
    for cost in report["cost"]:
        lines += cost_lines(cost)
    if report["stepping"]:
        lines += stepping_lines(report["stepping"])
    return "\n".join(lines)


def row_line(row):
    """A line of the table of layers and peers."""
    name = row["side"] + (f" ({row['way']})" if row["way"] else "")
    line = f"{row['layer']:13}{name:37}{row['ms']:9.2f}  {row['threads']!s:8}"
    if "ratio" in row:
        at_most = "" if row["at_most"] is None else f"{row['at_most']:.2f}"
        line += f"{row['ratio']:6.2f}{at_most:>9}{row['aim'] or '':>6}  {row['verdict']}"
    return line.rstrip()


def cost_lines(cost):
    """One table of cost against size, and the polynomial fitted to it."""
    axis, fixed = cost["axis"], " ".join(f"{name}={size}" for name, size in cost["fixed"].items())
    lines = ["", f"{cost['layer']} over {axis} ({fixed}, one thread)",
             f"{axis:>7}{'ms':>11}{'us a step':>12}{'bytes a step, sample and unit: cache':>40}{'peak':>9}"]
    lines += [f"{row[axis]:7}{row['ms']:11.2f}{row['us_per_step']:12.1f}{row['cache_bytes']:40.1f}"
              f"{row['peak_bytes']:9.1f}" for row in cost["rows"]]
    terms = [f"{coefficient:.3g} ms" + (f" x {axis}" if power else "") + (f"^{power}" if power > 1 else "")
             for power, coefficient in enumerate(cost["coefficients_ms"])]
    kind = "linear" if len(terms) == 2 else "quadratic"
    return [*lines, f"{' + '.join(terms)}: farthest point off by {100 * cost['farthest']:.0f} %: "
            f"{kind if cost['fits'] else 'NOT ' + kind} (at most {100 * STRAIGHT:.0f} %)"]


def stepping_lines(stepping):
    """What a byte costs at the beginning and at the end."""
    lines = ["", "SRU++ step by step: {layers} layers, d={d} d'={d'}, {vocab} symbols, one text of {bytes:,} bytes, "
             "one thread".format(**stepping), f"{'window':>7}{'us a byte: near the start':>27}{'in the last tenth':>20}"
             f"{'ratio':>8}  verdict (at most {SAME} with a window)"]
    return lines + [f"{row['window'] or 'none':>7}{row['first_us']:27.0f}{row['last_us']:20.0f}{row['ratio']:8.2f}"
                    f"  {row['verdict']}" for row in stepping["rows"]]


# ---- the figure ------------------------------------------------------------------------------------------

def draw(report, path):
    """A bar for each line of the table, in the colour of its row; next to it cost over L, where that was measured."""
    over_L = [cost for cost in report["cost"] if cost["axis"] == "L"]
    figure, axes = new_figure(13.0 if over_L else 8.0, max(4.4, 1.2 + 0.2 * len(report["table"])))
    if over_L:
        grid = figure.add_gridspec(1, 2)
        axes.set_subplotspec(grid[0])
        draw_over_L(figure.add_subplot(grid[1]), over_L)
    colour, rows = dict(zip(report["sizes"], itertools.cycle(COLOURS))), report["table"][::-1]
    bars = axes.barh([f"{row['layer']}, {row['side']}" for row in rows], [row["ms"] for row in rows],
                     color=[colour[row["layer"]] for row in rows])
    axes.margins(x=0.1)
    axes.bar_label(bars, [f"{row['ms']:.1f}" for row in rows], padding=3, fontsize=8)
    axes.set_xlabel(textwrap.fill(f"ms, {WHAT}", 60))
    sizes = [textwrap.fill(f"{name}: {size}", 80) for name, size in report["sizes"].items()]
    axes.set_title("\n".join(sizes), fontsize=7)
    save(figure, path)


def draw_over_L(axes, tables):
    """ms against L, both logarithmic: where the slope is one, cost is linear."""
    for cost, colour in zip(tables, COLOURS):
        axes.plot([row["L"] for row in cost["rows"]], [row["ms"] for row in cost["rows"]], color=colour, marker="o",
                  markersize=3, linewidth=1.5, label=cost["layer"])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    fixed = " ".join(f"{name}={size}" for name, size in tables[-1]["fixed"].items())
    ticks = [row["L"] for row in tables[0]["rows"]]
    axes.set(xscale="log", yscale="log", xlabel="L", ylabel="ms, forward + backward")
    axes.set_xticks(ticks, labels=ticks)
    axes.minorticks_off()
    axes.set_title(f"cost over L ({fixed}, one thread)", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
