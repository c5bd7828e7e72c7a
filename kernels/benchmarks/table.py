"""Markdown tables from the JSON lines of the benchmarks on standard input, one table a case."""

import json
import sys
from itertools import groupby

COLUMNS = {
    "median_ms": ("ms", "{:.2f}"),
    "padded_tflops": ("TFLOP/s padded", "{:.0f}"),
    "valid_tflops": ("TFLOP/s valid", "{:.0f}"),
    "gb_per_s": ("GB/s", "{:,.0f}"),
    "of_roof": ("of the roof", "{:.2f}"),
}


def main() -> None:
    lines = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    for case, group in groupby(lines, key=lambda line: line["case"]):
        rows = list(group)
        shown = {key: value for key, value in COLUMNS.items() if any(key in row for row in rows)}
        slowest = max(row["median_ms"] for row in rows)
        print(f"\n{case}\n")
        print("| | " + " | ".join(title for title, _ in shown.values()) + " | spread ms | against the slowest |")
        print("|---" * (len(shown) + 3) + "|")
        for row in rows:
            cells = [style.format(row[key]) if key in row else "" for key, (_, style) in shown.items()]
            spread = f"{row['fastest_ms']:.2f}-{row['slowest_ms']:.2f}"
            print(f"| {row['variant']} | {' | '.join(cells)} | {spread} | {slowest / row['median_ms']:.2f}x |")


if __name__ == "__main__":
    main()
