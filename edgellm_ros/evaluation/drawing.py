# SPDX-License-Identifier: Apache-2.0
"""Charts of evaluations: histograms, and shares with their intervals.

Matplotlib draws them, and is imported with the first picture. Its state is not changed: no pyplot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgellm_ros.echo import escaped
from edgellm_ros.evaluation.shares import Share, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "needs Matplotlib, which is not installed: pip install 'edgellm[charts]'"
WIDTH, HEADER, MARGIN = 12.0, 1.1, 0.2  # inches
SMALL, LARGE, HEADLINE = 10, 13, 20  # sizes of letters in points
# The palette of Okabe and Ito, whose colours people with any kind of colour blindness tell apart.
GREEN, RED, BLUE, SKY = "#009E73", "#D55E00", "#0072B2", "#56B4E9"
INK, FAINT, GRID = "#26292F", "#5C6068", "#E0E0DC"
STYLE = {
    "figure.dpi": 150,
    "font.size": SMALL,
    "text.color": INK,
    "text.parse_math": False,  # names may have dollar signs
    "axes.titlesize": LARGE,
    "axes.titlelocation": "left",
    "axes.labelcolor": FAINT,
    "axes.edgecolor": INK,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.autolimit_mode": "round_numbers",
    "axes.ymargin": 0,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1,
}
BINS = 40
STEPS = [1, 2, 5, 10]  # of an axis, times a power of ten


@contextmanager
def picture(path: Path, height: float, title: str, facts: str) -> Iterator[Figure]:
    """Yield a figure with a header; write it as PNG at the end.

    height: in inches. ImportError without Matplotlib, OSError if the file cannot be written.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ImportError(f"{path.name} {MISSING}") from None
    below = MARGIN / WIDTH, MARGIN / height, 1 - 2 * MARGIN / WIDTH, 1 - (HEADER + MARGIN) / height
    with style.context(["default", STYLE]):  # the user's own style is left out
        layout = ConstrainedLayoutEngine(rect=below, wspace=0.06, hspace=0.06)
        figure = Figure((WIDTH, height), layout=layout)
        figure.text(MARGIN / WIDTH, 1 - 0.5 / height, escaped(title), size=HEADLINE)
        figure.text(MARGIN / WIDTH, 1 - 0.85 / height, escaped(facts), color=FAINT, size=11)
        yield figure
        figure.savefig(path, format="png")


def draw_shares(axes: Axes, groups: Sequence[tuple[str, Share]], label: str, divided: int = 0) -> None:
    """Draw shares of episodes as dots, 95% intervals as lines, and numbers.

    label: what the groups differ in. divided: the number of groups before a line that divides the panel;
    0 = no line.
    """
    from matplotlib.ticker import MaxNLocator

    divided = sum(1 for _, share in groups[:divided] if share.of)
    groups = [group for group in groups if group[1].of]
    if not groups:
        _empty(axes, "no episodes")
        return
    places = range(len(groups))
    values = np.array([100 * share.count / share.of for _, share in groups])
    low, high = 100 * np.array([share.interval for _, share in groups]).T
    axes.errorbar(
        places,
        values,
        (values - low, high - values),
        fmt="o",
        color=GREEN,
        markersize=9,
        linewidth=2.5,
        capsize=8,
        capthick=2.5,
        clip_on=False,
    )
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the grid
    for at in zip(places, values, strict=True):
        axes.annotate(f"{at[1]:.0f}%", at, (11, 0), textcoords="offset points", va="center", bbox=paper)
    axes.set_xticks(places, [f"{escaped(name)}\n{share.count} of {share.of}" for name, share in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(10 * np.floor(low.min() / 10), 100)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_xlabel(label)
    axes.set_ylabel("share of episodes")
    if 0 < divided < len(groups):
        axes.axvline(divided - 0.5, color=GRID)


def draw_histogram(
    axes: Axes, series: Sequence[tuple[str, str, Sequence[float]]], label: str, unit: str, counted: str
) -> None:
    """Draw histograms over one axis, each with its median.

    series: names, colours and values. label: what the values are, in the unit. counted: what has a value.
    Values beyond the axis are in the last bar.
    """
    from matplotlib.ticker import MaxNLocator

    series = [(name, color, sorted(values)) for name, color, values in series if values]
    if not series:
        _empty(axes, "no values")
        return
    reach = 1.02 * max(percentile(ordered, 99) for _, _, ordered in series)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=True))
    last = MaxNLocator(8, steps=STEPS).tick_values(0, max(reach, 1e-6))[-1]
    for name, color, ordered in series:
        median = percentile(ordered, 50)
        text = f"{name}: median {median:.{0 if median >= 10 else 1}f} {unit}"
        edges = np.linspace(0, last, BINS + 1).tolist()
        axes.hist(np.minimum(ordered, last), edges, rwidth=0.92, color=color, label=text)
        axes.axvline(median, color=INK, linestyle="--", linewidth=1.2)
    beyond = sum(value > last for _, _, ordered in series for value in ordered)
    axes.set_xlim(0, last)
    axes.set_xlabel(f"{label} ({unit})" + (f"; {beyond} beyond {last:g} in the last bar" if beyond else ""))
    axes.set_ylabel(counted)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series), borderaxespad=0.2)


def _empty(axes: Axes, words: str) -> None:
    """Say why there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=FAINT)
