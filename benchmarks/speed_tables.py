"""From the stored result of `speed.py` to docs/speed.md: tables, what was missed, and the figure of growth."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.numbers.summary import Interval
from speed_passes import floor_share
from speed_results import PARTS, Row, write_text
from speed_timing import plain_numbers, rate, rate_ratio, time_ratio, tokens_a_pass, whole_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT, FIGURE = ROOT / "docs" / "speed.md", ROOT / "docs" / "speed.svg"
NEVER_SLOWER = 0.97
"""What a cell's ratio must reach."""

_BLOCK = re.compile(r"(<!-- begin:generated speed -->\n)(.*?)(<!-- end:generated speed -->)", re.DOTALL)
_ENVIRONMENT = ("processor", "cpu_capability", "num_threads", "omp_wait_policy", "torch")
_OWN_PLAIN = {
    "dflash": "plain",
    "chain": "plain",
    "transformers dflash": "transformers",
    "z-lab dflash": "transformers",
    "vllm dflash": "vllm",
    "openvino dflash": "openvino",
}
_TITLES = {
    "plain": "ours, plain",
    "dflash": "ours, as `LLM()` drafts",
    "chain": "ours, the drafter's chains alone",
}


def span(interval: Interval | None) -> str:
    """Returns a ratio with its ends, "?" where nothing is known, as of a single sample. Pure."""
    numbers = plain_numbers(interval)
    if numbers is None:
        return "?"
    estimate, low, high = ("?" if number is None else f"{number:.2f}" for number in numbers)
    return f"{estimate} (?)" if numbers[1:] == [0.0, None] else f"{estimate} ({low}–{high})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1) -> str:
    """Returns a Markdown table; all columns but the first ones are numbers. Pure."""
    rule = ["---"] * num_names + ["---:"] * (len(columns) - num_names)
    lines = [columns, rule, *rows]
    return "\n".join(
        "|" + "|".join(line) + "|" if line is rule else f"| {' | '.join(line)} |" for line in lines
    )


# Parts ---------------------------------------------------------------------------------------------------------------


def plain_part(rows: Sequence[Row]) -> str:
    """Returns plain decoding against the memory and against transformers. Pure."""
    (row,) = rows
    plain, theirs = row["samples"]["plain"], row["samples"]["transformers"]
    lines = []
    for name, rates in row["bytes_per_s"].items():
        middle = sorted(rates)[len(rates) // 2] / 1e9
        share = span(floor_share(plain, rates, row["weight_bytes"]))
        lines.append([f"share of the floor by {name}, {middle:.1f} GB/s", share])
    lines.append([f"tok/s over {row['versions']['transformers']}", span(rate_ratio(plain, theirs))])
    lines.append(["the same, prompts included", span(whole_ratio(plain, theirs))])
    text = table(["plain decoding, batch 1", "ratio (95 %)"], lines)
    return (
        f"{text}\n\nA pass reads {row['weight_bytes'] / 1e6:.0f} MB of weights; the floor is the time that takes "
        "at the rate measured beside each prompt (a copy counts bytes read and written). "
        f"{_same(row, 'transformers')} of {row['num_texts']} texts are those of transformers; ours had "
        f"{_rate(plain)} tok/s, transformers {_rate(theirs)}."
    )


def rows_part(rows: Sequence[Row]) -> str:
    """Returns what wider passes cost. Pure."""
    cost = {(row["kind"], row["num_rows"]): span(time_ratio(row["seconds"], row["plain_s"])) for row in rows}
    widths = sorted({num_rows for _, num_rows in cost})
    lines = [[str(n), cost.get(("chain", n), ""), cost.get(("tree", n), "")] for n in widths]
    return table(["rows of a pass", "chain / plain pass", "tree / plain pass"], lines)


def pairs_part(rows: Sequence[Row]) -> str:
    """Returns the pair against its own plain decoding by set, and pooled. Pure."""
    lines = [[row["set"], *_pair(row)] for row in rows]
    for temperature, batch in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        members = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
        if len(members) > 1:
            lines.append(["**all**", *_pair(pooled_row(members))])
    return table(["set", "T", "batch", "same texts", "τ", "ratio (95 %)", "prompts included"], lines)


def pooled_row(rows: Sequence[Row]) -> Row:
    """Returns rows of one temperature and batch as one, with all their samples. Pure."""
    arms = rows[0]["samples"]
    return {
        **rows[0],
        "num_texts": sum(row["num_texts"] for row in rows),
        "num_same": {"dflash": sum(row["num_same"]["dflash"] for row in rows)},
        "samples": {arm: [sample for row in rows for sample in row["samples"][arm]] for arm in arms},
    }


def _pair(row: Row) -> list[str]:
    plain, dflash = row["samples"]["plain"], row["samples"]["dflash"]
    return [
        f"{row['temperature']:g}",
        str(row["batch"]),
        f"{_same(row, 'dflash')} of {row['num_texts']}",
        span(tokens_a_pass(dflash)),
        span(rate_ratio(dflash, plain)),
        span(whole_ratio(dflash, plain)),
    ]


def engines_part(rows: Sequence[Row]) -> str:
    """Returns the engines beside ours, and why others are missing. Pure."""
    (row,) = rows
    samples, lines = row["samples"], []
    for name in samples:
        own = _OWN_PLAIN.get(name)
        same = f"{_same(row, name)} of {row['num_texts']}" if name in row["num_same"] else ""
        lines.append(
            [
                _TITLES.get(name, name),
                row["versions"][name],
                same,
                span(tokens_a_pass(samples[name])) if own else "",
                span(rate_ratio(samples[name], samples[own])) if own in samples else "",
                "1" if name == "dflash" else span(rate_ratio(samples["dflash"], samples[name])),
                _rate(samples[name]),
            ]
        )
    columns = ["engine", "version", "texts of ours", "τ", "over its own plain", "ours over it", "tok/s"]
    absent = [f"- {name}: {reason}" for name, reason in row["absent"].items()]
    missing = ["", "Did not run here:", "", *absent] if absent else []
    return "\n".join([table(columns, lines, num_names=2), *missing])


def cells_part(rows: Sequence[Row]) -> str:
    """Returns the ratio of every cell, and which of them are slower than they may be. Pure."""
    sections = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        found = {
            (row["kind"], row["batch"]): rate_ratio(row["samples"]["dflash"], row["samples"]["plain"])
            for row in rows
            if row["temperature"] == temperature
        }
        kinds, batches = dict.fromkeys(kind for kind, _ in found), sorted({batch for _, batch in found})
        lines = [[kind, *(_cell(found.get((kind, batch), "")) for batch in batches)] for kind in kinds]
        sections.append(table([f"work, T {temperature:g}", *(f"batch {b}" for b in batches)], lines))
        sections.append(verdict(found))
    return "\n\n".join(sections)


def verdict(found: Mapping[tuple[str, int], Interval | None]) -> str:
    """Returns how many cells reach the target, and which miss it, in words. Pure."""
    known = {cell: interval for cell, interval in found.items() if interval is not None}
    missed = [f"{kind} × {batch}" for (kind, batch), i in known.items() if i.estimate < NEVER_SLOWER]
    sure = sum(i.low >= NEVER_SLOWER for i in known.values())
    words = f"Target: no cell below {NEVER_SLOWER}. "
    words += (
        f"**Missed** in {len(missed)} of {len(found)}: {', '.join(missed)}"
        if missed
        else "Met in all measured cells"
    )
    unknown = f"; {len(found) - len(known)} say nothing" if len(known) < len(found) else ""
    return f"{words}; the whole interval is above it in {sure}{unknown}."


def _cell(interval: Interval | str | None) -> str:
    if isinstance(interval, str):
        return interval
    words = span(interval)
    return f"**{words}**" if interval is not None and interval.estimate < NEVER_SLOWER else words


def growth_part(rows: Sequence[Row]) -> str:
    """Returns speed by context and by batch. Pure."""
    lines = []
    for row in ordered(rows):
        plain, dflash = row["samples"]["plain"], row["samples"]["dflash"]
        held = row["bytes_per_sequence"]
        lines.append(
            [
                row["axis"],
                f"{row['value']:,}",
                _rate(plain),
                _rate(dflash),
                span(rate_ratio(dflash, plain)),
                f"{_same(row, 'dflash')} of {row['num_texts']}",
                f"{held['target'] / 1e6:.1f} + {held['drafter'] / 1e6:.1f} MB",
            ]
        )
    columns = [
        "grows",
        "to",
        "plain tok/s",
        "DFlash tok/s",
        "ratio (95 %)",
        "same texts",
        "K/V of a sequence",
    ]
    return table(columns, lines) + "\n\n![Speed by context and by batch](speed.svg)"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Returns contexts before batches, each ascending. Pure."""
    return sorted(rows, key=lambda row: (row["axis"] != "context", row["value"]))


def _rate(samples: Sequence[Sequence[float]]) -> str:
    found = rate(samples)
    return "?" if found is None else f"{found:.1f}"


def _same(row: Row, arm: str) -> str:
    return str(row["num_same"][arm])


# The page ------------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "plain": ("Plain decoding", plain_part),
    "rows": ("Wider passes", rows_part),
    "pairs": ("Speculation against plain decoding", pairs_part),
    "engines": ("Other engines", engines_part),
    "cells": ("Never slower", cells_part),
    "growth": ("Growth", growth_part),
}


def page(result: Mapping[str, Any]) -> str:
    """Returns the generated part of docs/speed.md. Pure."""
    sections = []
    for name in PARTS:
        title, text_of = SECTIONS[name]
        part = result["parts"].get(name)
        if part is None or not part["rows"]:
            text = f"Not measured yet: `python benchmarks/speed.py {name}`."
        else:
            text = f"{text_of(part['rows'])}\n\n{source_line(part)}"
        sections.append(f"## {title}\n\n{text}\n")
    return "\n".join(sections)


def source_line(part: Mapping[str, Any]) -> str:
    """Returns where a part's numbers come from. Pure."""
    where = ", ".join(f"{name} {part['environment'][name]}" for name in _ENVIRONMENT)
    chosen = ", ".join(f"{name} {value}" for name, value in part["settings"].items())
    return f"Measured {part['date']} by `{part['command']}` ({chosen}) on {where}."


def written(document: str, result: Mapping[str, Any]) -> str:
    """Returns the document with its generated part anew. Pure.

    Raises:
        ValueError: it has no place for it.
    """
    if len(_BLOCK.findall(document)) != 1:
        raise ValueError(f"{DOCUMENT.name}: expected one block `generated speed`")
    return _BLOCK.sub(lambda match: match[1] + page(result) + match[3], document)


def write(result: Mapping[str, Any]) -> None:
    """Rewrites docs/speed.md and, where growth was measured, its figure."""
    write_text(DOCUMENT, written(DOCUMENT.read_text(encoding="utf-8"), result))
    if "growth" in result["parts"]:
        write_text(FIGURE, figure(result["parts"]["growth"]["rows"]))


def figure(rows: Sequence[Row]) -> str:
    """Returns the figure of growth as SVG, the same for the same rows."""
    import io

    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "speed"}):
        drawing = Figure(figsize=(10, 3.6), layout="constrained")
        FigureCanvasSVG(drawing)
        for axes, axis, label in zip(
            drawing.subplots(1, 2), ("context", "batch"), ("tokens of context", "sequences"), strict=True
        ):
            _draw(axes, [row for row in ordered(rows) if row["axis"] == axis], label)
        svg = io.StringIO()
        drawing.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def _draw(axes: Axes, rows: Sequence[Row], label: str) -> None:
    for arm, marker in (("plain", "o"), ("dflash", "s")):
        points = [(row["value"], rate(row["samples"][arm])) for row in rows]
        known = [(x, y) for x, y in points if y is not None]
        axes.plot([x for x, _ in known], [y for _, y in known], marker=marker, label=arm)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("tok/s, all sequences together")
    axes.grid(alpha=0.3)
    axes.legend()
