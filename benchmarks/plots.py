"""Figures of benchmarks/results/*.json: time against tokens with the byte floor, and the share of the floor reached.

    python benchmarks/plots.py                  # every figure, as SVG beside its JSON
    python benchmarks/plots.py --format png     # for pages that show no SVG

Each figure shows one dataset; its caption is the dataset's own environment. Nothing is measured or computed here but
floor / time.
"""

import argparse
import json
from pathlib import Path

from ple_compile.measuring.figures import draw

RESULTS = Path(__file__).parent / "results"

# Figure: (dataset, table in it, which of its rows, title, ways to show)
FIGURES = {
    "gate-conv-h200": (
        "kernels-h200.json",
        "gate + conv, us",
        {"work": "prefill"},
        "gate + norms + conv + residuals",
        ("eager", "inductor", "vllm", "ours"),
    ),
    "lookup-h200": (
        "lookup-h200.json",
        "lookup, us",
        {},
        "ids and rows of a device table",
        ("ids, index_select", "index_select", "ple::ngram_lookup"),
    ),
}


def rows_of(report: dict, table: str, where: dict[str, str]) -> list[dict]:
    return [row for row in report[table] if all(row[name] == value for name, value in where.items())]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the figures")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (dataset, table, where, title, ways) in FIGURES.items():
        report = json.loads((RESULTS / dataset).read_text())
        draw(
            rows_of(report, table, where), ways, title, report["environment"], options.out / f"{name}.{options.format}"
        )


if __name__ == "__main__":
    main()
