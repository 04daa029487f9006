"""The scaling report as a picture: a field for each size that grows."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.decoding.tables import shown_size, title
from serve.demo.picture import BLUE, GREY, ORANGE

AXES = {
    "context": "cached tokens", "batch": "sequences", "tree": "nodes of the tree", "vocabulary": "vocabulary",
    "levels": "levels of the draft",
}  # fmt: skip


def draw_scaling(report: dict[str, Any], path: str | Path) -> None:
    """Milliseconds against each size: measured (points), and the cost model (dashed)."""
    figure, fields = pyplot.subplots(1, len(AXES), figsize=(17, 4), layout="constrained")
    for axes, (size, label) in zip(fields, AXES.items(), strict=True):
        rows = [row for row in report["rows"] if row["size"] == size]
        for nodes, colour, name in ((0, GREY, "draft"), (1, BLUE, "plain pass"), (None, ORANGE, "tree's pass")):
            tree = [row for row in rows if row["nodes"] == (report["tree"] if size != "tree" else row["value"])]
            line = tree if nodes is None else [row for row in rows if row["nodes"] == nodes and size != "tree"]
            if line:
                at = [row["value"] for row in line]
                axes.plot(at, [row["ms"] for row in line], "o-", color=colour, label=name)
                axes.plot(at, [row["model_ms"] for row in line], "--", color=colour, label="cost model")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        values = sorted({row["value"] for row in rows})
        axes.set_xticks(values, [shown_size(value) for value in values])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    fields[0].set_ylabel("milliseconds")
    figure.suptitle(title(report), fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
