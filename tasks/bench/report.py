"""What tasks/bench.py shows: the report as text, and as a figure."""

import itertools
import textwrap

from tasks.bench.measure import STRAIGHT
from tasks.bench.srupp import NOISE, SAME
from tasks.frame.figures import COLOURS, new_figure, save

LAYERS = ("RRALSTM", "LSTM", "IRNN", "RWA", "URNN", "SRUpp", "TSDAE step", "TSDAE encode", "IMDB step", "IMDB RRALSTM")
COLOUR = dict(zip(LAYERS, itertools.cycle(COLOURS)))
WHAT = "forward + backward (TSDAE step: and AdamW; IMDB step: and Adadelta; TSDAE encode: forward)"


def text_of(report):
    """The report as lines of text."""
    lines = [f"{', '.join(family['layers'])}: {family['size']}" for family in report["sizes"].values()]
    lines += [f"float32, {WHAT}, best of at least {report['settings']['repeats']} calls", *report["notes"],
              *report["differing"], "", f"{'':65}{'ms':>9}  {'threads':8}{'ratio':>6}{'at most':>9}{'aim':>6}  verdict"]
    lines += [row_line(row) for row in report["table"]]
    rates = [f"{row['side']} {row['per_second']:,.0f}" for row in report["table"] if "per_second" in row]
    lines += ["", f"TSDAE encode, sentences a second: {', '.join(rates)}"] if rates else []
    for name, floor in report["floor"].items():
        parts = ", ".join(f"{name} {part['ms']:.2f}" for name, part in floor["parts"].items())
        lines += ["", f"floor of {', '.join(report['sizes'][name]['layers'])}: {floor['ms']:.2f} ms = {parts}"]
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
    """A row of the table of layers and peers."""
    name = row["side"] + (f" ({row['way']})" if row["way"] else "")
    line = f"{row['layer']:13}{name:52}{row['ms']:9.2f}  {row['threads']!s:8}"
    if "ratio" in row:
        at_most = "" if row["at_most"] is None else f"{row['at_most']:.2f}"
        line += f"{row['ratio']:6.2f}{at_most:>9}{row['aim'] or '':>6}  {row['verdict']}"
    return line.rstrip()


def cost_lines(cost):
    """One table of cost against size."""
    axis, fixed = cost["axis"], " ".join(f"{name}={size}" for name, size in cost["fixed"].items())
    beside, off = "only_attention" in cost, f"farthest point off by {100 * cost['farthest']:.0f} %"
    head = f"{axis:>7}{'ms':>11}{'us a step':>12}{'bytes a step, sample and unit: cache':>40}{'peak':>9}"
    head += f"{'attention alone, ms':>23}{'share':>8}{'the rest, us a step':>22}" if beside else ""
    lines = ["", f"{cost['layer']} over {axis} ({fixed}, one thread)", head]
    for row in cost["rows"]:
        line = (f"{row[axis]:7}{row['ms']:11.2f}{row['us_per_step']:12.1f}{row['cache_bytes']:40.1f}"
                f"{row['peak_bytes']:9.1f}")
        lines.append(line + (f"{row['attention_ms']:23.2f}{100 * row['attention_share']:6.0f} %"
                             f"{row['rest_us_per_step']:22.1f}" if beside else ""))
    if not beside:
        return [*lines, f"line {cost['start_ms']:.3g} ms + {cost['slope_ms']:.3g} ms x {axis}: {off}: "
                f"{'linear' if cost['linear'] else 'NOT linear'} (at most {100 * STRAIGHT:.0f} %)"]
    return [*lines, "{start_ms:.3g} ms + {slope_ms:.3g} ms x {axis} + {square_ms:.3g} ms x {axis}^2".format(**cost)
            + f": {off} (at most {100 * STRAIGHT:.0f} %)",
            f"the attention alone: {cost['attention_square_ms']:.3g} ms x {axis}^2: the square is "
            + (f"the attention's (at most {1 + STRAIGHT:.2f} of it)" if cost["only_attention"]
               else f"NOT the attention's alone (over {1 + STRAIGHT:.2f} of it, or points too far off)")]


def stepping_lines(stepping):
    """What a byte costs at the beginning and at the end."""
    at = ["bytes {}-{}".format(*stepping[part]) for part in ("beginning", "end")]
    lines = ["", "SRU++ step by step: {layers} layers, d={d} d'={d'}, {vocab} symbols, one text of {bytes:,} bytes, "
             "one thread".format(**stepping),
             f"{'window':>7}{'us a byte: ' + at[0]:>28}{at[1]:>20}{'ratio':>8}{'attention explains, us':>25}"
             f"{'at most, us':>14}  verdict"]
    for row in stepping["rows"]:
        lines.append(f"{row['window'] or 'none':>7}{row['first_us']:28.0f}{row['last_us']:20.0f}{row['ratio']:8.2f}"
                     f"{row['explained_us']:25.0f}{row['at_most_us']:14.0f}  {row['verdict']}")
    return [*lines, f"at most: {SAME} of the beginning with a window; without one {1 + NOISE:.2f} of it, and {SAME} of "
            "what a query costs more over the last bytes' keys than over the first ones'"]


# ---- the figure ------------------------------------------------------------------------------------------

def draw(report, path):
    """A bar a row of the table, in the colour of its layer; beside it cost over L, where that was measured."""
    over_L = [cost for cost in report["cost"] if cost["axis"] == "L"]
    figure, axes = new_figure(13.0 if over_L else 8.0, max(4.4, 1.2 + 0.2 * len(report["table"])))
    if over_L:
        grid = figure.add_gridspec(1, 2)
        axes.set_subplotspec(grid[0])
        draw_over_L(figure.add_subplot(grid[1]), over_L)
    rows = report["table"][::-1]
    bars = axes.barh([f"{row['layer']}, {row['side']}" for row in rows], [row["ms"] for row in rows],
                     color=[COLOUR[row["layer"]] for row in rows])
    axes.margins(x=0.1)
    axes.bar_label(bars, [f"{row['ms']:.1f}" for row in rows], padding=3, fontsize=8)
    sizes = "\n".join(textwrap.fill(f"{', '.join(family['layers'])}: {family['size']}", 80)
                      for family in report["sizes"].values())
    axes.set_xlabel(textwrap.fill(f"ms, {WHAT}", 60))
    axes.set_title(sizes, fontsize=9)
    save(figure, path)


def draw_over_L(axes, tables):
    """ms against L, both logarithmic: where the slope is one, cost is linear."""
    series = {cost["layer"]: [(row["L"], row["ms"]) for row in cost["rows"]] for cost in tables}
    series["its attention alone"] = [(row["L"], row["attention_ms"]) for row in tables[-1]["rows"]]
    for (name, points), colour in zip(series.items(), COLOURS):
        style = "--" if name == "its attention alone" else "-"
        axes.plot(*zip(*points), style, color=colour, marker="o", markersize=3, linewidth=1.5, label=name)
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
