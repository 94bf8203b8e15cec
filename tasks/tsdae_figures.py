"""The figures of tasks/tsdae.py."""

from tasks.frame.figures import COLOURS, draw_curves, new_figure, save

SHORT = {"mean of the trained word embeddings": "mean of its word embeddings"}


def without_first(points):
    """[(step, value)] from the first training step on; the untrained model's would squash the figure."""
    return [(step, value) for step, value in points if step]


def of_run(settings, log, out):
    """sts.png, loss.png, alignment-uniformity.png and grad_norm.png of a run's log."""
    title = title_of(settings)
    if "dev_spearman" in log.columns:
        draw_curves(out / "sts.png", {"Spearman": log.column("dev_spearman"), "Pearson": log.column("dev_pearson")},
                    title=f"{title}: STS dev", x_label="iteration", y_label="correlation")
    series = {"training": without_first(log.column("loss")), "held out": without_first(log.column("held_out_loss")),
              "held out, another sentence's embedding": without_first(log.column("held_out_loss_shuffled"))}
    draw_curves(out / "loss.png", series, title=f"{title}: rebuilding the sentence", x_label="iteration",
                y_label="nats per word")
    curves = {name: log.column(name) for name in ("alignment", "uniformity") if name in log.columns}
    draw_curves(out / "alignment-uniformity.png", curves, title=f"{title}: alignment and uniformity",
                x_label="iteration", y_label="nats; squared distance")
    clip = settings["clip_norm"]
    draw_curves(out / "grad_norm.png", {"global norm before clipping": log.column("grad_norm")}, title=title,
                x_label="iteration", y_label="gradient norm", log_y=True,
                horizontal=(clip, f"clipped at {clip:g}") if clip else None)


def title_of(settings):
    """What a run was: "TSDAE, delete 0.6, cls, tied"."""
    tied = "not tied" if settings["no_tie"] else "tied"
    return f"TSDAE, {settings['noise']} {settings['ratio']:g}, {settings['pooling']}, {tied}"


def draw_scores(scores, name, out):
    """scores.png: Spearman on test of the model and of what it has to beat, best first."""
    rows = sorted(((own["test"][0], SHORT.get(label, label), label) for label, own in scores.items()))
    figure, axes = new_figure(7.6, 0.36 * len(rows) + 1.2)
    colours = [COLOURS[0] if label.startswith("TSDAE") else "#b9bec6" for _, _, label in rows]
    bars = axes.barh([shown for _, shown, _ in rows], [value for value, _, _ in rows], color=colours)
    axes.bar_label(bars, [f"{value:.3f}" for value, _, _ in rows], padding=3, fontsize=8)
    axes.grid(False, axis="y")
    axes.margins(x=0.1)
    axes.set(title=name, xlabel="Spearman, cosines and gold scores")
    save(figure, out / "scores.png")


def draw_ablation(rows, path, name):
    """Spearman of the runs of an ablation: over the ratio of deletion as a curve, all others as bars beside the first.

    rows: [{"group", "label", "ratio", "dev": [of each seed], "test": [...]}]
    """
    over_ratio = sorted((row for row in rows if row["group"] == "ratio"), key=lambda row: row["ratio"])
    others = [row for row in rows if row["group"] != "ratio"]
    others = rows[:1] + others if others else []             # the first one is what they differ from
    over_ratio = over_ratio if len(over_ratio) > 1 or not others else []
    figure, axes = new_figure(10.0 if over_ratio and others else 7.0, 4.4)
    if over_ratio and others:
        grid = figure.add_gridspec(1, 2)
        axes.set_subplotspec(grid[0])
    if over_ratio:
        for part, colour in zip(("dev", "test"), COLOURS):
            points = [(row["ratio"], sum(row[part]) / len(row[part])) for row in over_ratio]
            axes.plot(*zip(*points), color=colour, marker="o", markersize=4, linewidth=1.7, label=part)
        axes.set(title="deletion", xlabel="share of words deleted", ylabel="Spearman")
        axes.legend(frameon=False, fontsize=8)
    if others:
        beside = figure.add_subplot(grid[1]) if over_ratio else axes
        for n, part in enumerate(("dev", "test")):
            values = [sum(row[part]) / len(row[part]) for row in others[::-1]]
            places = [place + 0.19 - 0.38 * n for place in range(len(others))]
            bars = beside.barh(places, values, height=0.36, color=COLOURS[n], label=part)
            beside.bar_label(bars, [f"{value:.3f}" for value in values], padding=2, fontsize=7)
        beside.set_yticks(range(len(others)), labels=[row["label"] for row in others[::-1]])
        for side in ("top", "right"):
            beside.spines[side].set_visible(False)
        beside.margins(x=0.12)
        beside.set_title("noise, pooling, tying", pad=22)
        beside.set_xlabel("Spearman")
        beside.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.suptitle(name, fontsize=10)
    save(figure, path)
