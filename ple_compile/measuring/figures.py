"""Figures of measurements: time against tokens with the byte floor as a line, and the share of that floor reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
_GREY = "#777777"  # on white and on dark pages alike


def pyplot() -> Any:
    """matplotlib's pyplot without a window; ValueError that names the extra where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("figures need matplotlib: pip install 'ple-compile[plots]'") from None
    matplotlib.use("Agg")
    # Text as text, and the same bytes from the same data.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ple-compile", "font.size": 9}
    import matplotlib.pyplot

    return matplotlib.pyplot


def check(file: Path) -> None:
    """Raise ValueError where a figure cannot be drawn, before hours were spent on what it would show."""
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"{file}: figures are .svg or .png files")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file}: the folder does not exist")
    pyplot()


def draw(rows: Sequence[dict], ways: Sequence[str], title: str, environment: dict[str, str], file: Path) -> None:
    """Two panels for rows with "tokens", a time in microseconds for each of `ways`, and "floor"."""
    plt = pyplot()
    figure, (times, shares) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    tokens = [row["tokens"] for row in rows]
    for way, colour in zip(ways, _COLOURS):
        times.plot(tokens, [row[way] for row in rows], marker="o", markersize=3, label=way, color=colour)
        shares.plot(tokens, [100 * row["floor"] / row[way] for row in rows], marker="o", markersize=3, color=colour)
    times.plot(tokens, [row["floor"] for row in rows], linestyle="--", color=_GREY, label="bytes at copy bandwidth")
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs", title=title)
    shares.set(
        xscale="log", ylim=(0, 100), xlabel="tokens", ylabel="% of the copy bandwidth", title="share of the floor"
    )
    shares.axhline(100, linestyle="--", color=_GREY)
    for axes in (times, shares):
        _finish(axes, tokens)
    figure.legend(loc="outside upper center", ncols=len(ways) + 1, frameon=False, fontsize=8)
    figure.supxlabel(caption(environment), fontsize=7, color=_GREY)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def _finish(axes: "Axes", tokens: list[int]) -> None:
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def caption(environment: dict[str, str]) -> str:
    """Hardware, versions and commit of a measurement; a commit that was not noted is called that."""
    commit = environment.get("commit", "")
    known = len(commit) >= 7 and all(digit in "0123456789abcdef" for digit in commit)
    where = environment["gpu"] if environment["gpu"] != "none" else environment["host"]
    return (
        f"{where}, torch {environment['torch']}, triton {environment['triton']}, "
        f"commit {commit[:10] if known else 'not noted'}; {environment['command']}"
    )
