"""Writes the generated blocks of README.md from benchmarks/results/*.json, or checks that they are current.

A block stands between `<!-- begin:generated NAME -->` and `<!-- end:generated NAME -->`; NAME is a key of `BLOCKS`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"

_BLOCK = re.compile(r"(<!-- begin:generated (\S+) -->\n)(.*?)(<!-- end:generated \2 -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:begin|end):generated")

_HEADER = (
    "| prompts | drafts | same tokens | acceptance length τ | plain tok/s | DFlash tok/s | ratio |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)
_ENVIRONMENT = ("processor", "cpu_capability", "num_threads", "omp_wait_policy", "torch")


class BlockError(ValueError):
    """A block or a result that is not what this file knows how to write."""


def decode_block(results: Path) -> str:
    """Returns the table of `decode_float32.json` and what belongs under it, or a sentence that nothing was measured.

    Raises:
        BlockError: a file is not the shape that benchmarks/README.md describes.
    """
    path = results / "decode_float32.json"
    if not path.exists():
        return (
            "Not measured yet: `make bench` measures, and `make tables` writes this table from the results.\n"
        )
    try:
        result = _load(path)
        rows = [_decode_row(row) for row in result["rows"]]
        totals = [_decode_row({**row, "set": "**all**"}) for row in result["totals"]]
        notes = [
            _source_line(result, path),
            *_sampled_line(result),
            *_half_line(results / "decode_bfloat16.json"),
            *_other_lines(result),
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BlockError(
            f"{path}: expected the shape in benchmarks/README.md, got {error!r}; run `make bench` again"
        ) from error
    return "\n".join([_HEADER, *rows, *totals, "", *notes, ""])


def _load(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _decode_row(row: dict[str, Any]) -> str:
    if row["identical"] != (row["num_identical"] == row["num_prompts"]):
        raise ValueError(f"{row['set']}: identical is {row['identical']}, but the counts say otherwise")
    cells = (
        row["set"],
        row["drafts"],
        f"{row['num_identical']} of {row['num_prompts']}",
        f"{row['acceptance_length']:.2f}",
        f"{row['plain_tokens_per_s']:.1f}",
        f"{row['dflash_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}×",
    )
    return "| " + " | ".join(cells) + " |"


def _source_line(result: dict[str, Any], path: Path) -> str:
    where = ", ".join(f"{name} {result['environment'][name]}" for name in _ENVIRONMENT)
    return (
        f"Greedy, batch 1, {result['max_new_tokens']} new tokens, float32, logits of wide and narrow passes "
        f"{result['row_invariance']}. Measured {result['date']} by `{result['command']}` on {where}; stored in "
        f"`benchmarks/results/{path.name}`."
    )


def _sampled_line(result: dict[str, Any]) -> list[str]:
    """Returns a sentence on sampled texts, where they were measured."""
    if "sampled" not in result:
        return []
    found = result["sampled"]
    cells = [
        f"{row['drafts']} τ {row['acceptance_length']:.2f}, {row['ratio']:.2f}× "
        f"({row['num_identical']} of {row['num_prompts']} texts the same)"
        for row in found["totals"]
    ]
    return [f"At temperature {found['temperature']:g} over all prompts: {'; '.join(cells)}."]


def _half_line(path: Path) -> list[str]:
    """Returns a sentence on bfloat16, where it was measured."""
    if not path.exists():
        return []
    result = _load(path)
    counts = [f"{r['num_identical']} of {r['num_prompts']} ({r['drafts']})" for r in result["totals"]]
    emulated = (
        "" if result["environment"]["fast_bfloat16"] else ", since this processor has no bfloat16 products"
    )
    return [
        f"In bfloat16 the tokens are the same for {' and '.join(counts)} prompts, logits {result['row_invariance']}; "
        f"τ {result['totals'][0]['acceptance_length']:.2f}, ratio {result['totals'][0]['ratio']:.2f}×{emulated} "
        f"(`benchmarks/results/{path.name}`)."
    ]


def _other_lines(result: dict[str, Any]) -> list[str]:
    """Returns sentences on transformers and on batches, where they were measured."""
    if "transformers" not in result:
        return []
    other, batch = result["transformers"], {row["batch"]: row["tokens_per_s"] for row in result["batch"]}
    narrow, wide = min(batch), max(batch)
    return [
        f"Plain decoding itself is {other['ratio']:.2f}× as fast as transformers' `generate` on the same weights, and "
        f"{batch[wide] / batch[narrow]:.1f}× as many tokens per second at batch {wide} as at batch {narrow}."
    ]


def exactness_block(results: Path) -> str:
    """Returns the table of `exactness_float32.json` and sentences on the other exactness results.

    Raises:
        BlockError: a file is not the shape that benchmarks/README.md describes.
    """
    path = results / "exactness_float32.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/exactness.py` measures, and `make tables` writes this table.\n"
    try:
        result = _load(path)
        header = "| drafts | texts at once | same text | acceptance length τ |\n|---|---:|---:|---:|"
        rows = [_exactness_row(row) for row in result["random"]["rows"][1:]]
        notes = [
            *_exactness_lines(result, path),
            *_other_dtype_line(results / "exactness_bfloat16.json"),
            *_sampling_lines(results / "sampling.json"),
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BlockError(
            f"{path}: expected the shape in benchmarks/README.md, got {error!r}; run it again"
        ) from error
    return "\n".join([header, *rows, "", *notes, ""])


def _exactness_row(row: dict[str, Any]) -> str:
    if row["num_identical"] + len(row["different"]) != row["num_requests"]:
        raise ValueError(f"{row['drafts']}: the counts of equal and different texts do not add up")
    length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
    same = f"{row['num_identical']} of {row['num_requests']}"
    return f"| {row['drafts']} | {row['batch']} | {same} | {length} |"


def _exactness_lines(result: dict[str, Any], path: Path) -> list[str]:
    tiny, texts = result["tiny"]["rows"][1:], result["json"]
    same = f"{sum(r['num_identical'] for r in tiny)} of {sum(r['num_requests'] for r in tiny)}"
    drafted = ", ".join(
        f"{r['num_identical']} of {r['num_requests']} with a {r['drafts']} (τ {r['acceptance_length']:.2f})"
        for r in texts["rows"][1:]
    )
    return [
        f"{result['random']['rows'][0]['num_requests']} seeded requests with random options (temperature 0 to 1.5, "
        "every filter, penalties, stops, grammars) on the default pair in float32, against plain decoding alone; "
        f"logits {result['random']['row_invariance']}. Measured {result['random']['date']} by "
        f"`{result['random']['command']}`; stored in `benchmarks/results/{path.name}`.",
        f"On tiny pairs in float64: {same} over {len(tiny)} ways of drafting.",
        f"JSON schemas: {texts['num_valid']} of {texts['num_requests']} texts valid; the same as plain constrained "
        f"decoding: {drafted}.",
        *(
            f"{name.capitalize()} pair, {_directed_line(result['directed'][name])}"
            for name in ("tiny", "real")
        ),
    ]


def _directed_line(part: dict[str, Any]) -> str:
    (check,) = [check for check in part["checks"] if check["name"] == "directed"]
    flagged = [check["name"] for check in part["checks"] if check["status"] == "flagged"]
    return (
        f"{part['num_tokens']:,} sampled tokens: directed score {check['summary']}; "
        f"{'flagged: ' + ', '.join(flagged) if flagged else 'nothing flagged'}."
    )


def _other_dtype_line(path: Path) -> list[str]:
    if not path.exists():
        return []
    result = _load(path)
    rows = result["random"]["rows"][1:]
    same = f"{sum(r['num_identical'] for r in rows)} of {sum(r['num_requests'] for r in rows)}"
    return [
        f"In {result['dtype']}: {same} texts over {len(rows)} ways of drafting, logits "
        f"{result['random']['row_invariance']} (`benchmarks/results/{path.name}`)."
    ]


def _sampling_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    result = _load(path)
    dearest = max(
        (row for row in result["cost"] if row["request"] not in ("pass", "draft")),
        key=lambda row: float(row["share_of_step"]),
    )
    lengths = {
        (r["drafts"], r["keyed"]): r["acceptance_length"] for r in result["acceptance"] if r["set"] == "all"
    }
    gains = ", ".join(
        f"{drafts} {lengths[drafts, False]:.2f} → {lengths[drafts, True]:.2f}"
        for drafts in dict.fromkeys(drafts for drafts, _ in lengths)
    )
    return [
        f"Sampling costs at most {100 * dearest['share_of_step']:.0f} % of a step of {dearest['rows']} rows; at "
        f"temperature {result['temperature']:g} drafts that know the noise raise τ: {gains} "
        f"(`benchmarks/results/{path.name}`)."
    ]


def bench_block(results: Path) -> str:
    """Returns what `paceline bench` said of the default pair, by load; then sentences on the other stored runs.

    Raises:
        BlockError: a file is not the shape that benchmarks/README.md describes.
    """
    path = results / "bench" / "default_pair" / "report.json"
    if not path.exists():
        return (
            "Not measured yet: see benchmarks/README.md for the plans, and `make tables` writes this table.\n"
        )
    try:
        report = _load(path)
        verdicts = [f"> {decision['sentence']}" for decision in report["summary"]["decisions"]]
        notes = [
            _run_line(report, path),
            _control_line(report),
            *_implementations_line(results / "bench" / "implementations" / "report.json"),
            *_server_line(results / "bench" / "vllm_server" / "report.json"),
            *_calibration_line(results / "calibration.json"),
        ]
        table = _ratio_table(report["summary"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BlockError(
            f"{path}: expected the shape in benchmarks/README.md, got {error!r}; run it again"
        ) from error
    return "\n\n".join(["\n>\n".join(verdicts), table, "\n".join(notes)]) + "\n"


def _ratio_table(summary: dict[str, Any]) -> str:
    """Returns a row for each arm and temperature, a column for each load."""
    cells = [cell for cell in summary["cells"] if cell["kind"] is None and cell["ratio"] is not None]
    loads = sorted({cell["load"]["concurrency"] for cell in cells})
    rows = dict.fromkeys((cell["arm"], cell["temperature"]) for cell in cells)
    lines = [
        "| arm | temperature | τ | " + " | ".join(f"{load} at once" for load in loads) + " |",
        "|---|---:|---:|" + "---:|" * len(loads),
    ]
    for arm, temperature in rows:
        ours = {
            cell["load"]["concurrency"]: cell
            for cell in cells
            if (cell["arm"], cell["temperature"]) == (arm, temperature)
        }
        length = ours[loads[0]]["acceptance"]["length"]["estimate"]
        spans = " | ".join(_span(ours[load]["ratio"]) for load in loads)
        lines.append(f"| {arm} | {temperature:g} | {length:.2f} | {spans} |")
    return "\n".join(lines)


def _span(interval: dict[str, float]) -> str:
    return f"{interval['estimate']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def _run_line(report: dict[str, Any], path: Path) -> str:
    where = ", ".join(f"{name} {report['environment'][name]}" for name in _ENVIRONMENT)
    blocks = report["plan"]["num_blocks"]
    return (
        f"Output speed of a request over plain decoding's, paired, with 95 % intervals from {blocks} blocks of "
        f"{report['plan']['items_per_kind']} requests of each of {len(report['workload']['kinds'])} kinds "
        f"({', '.join(report['workload']['kinds'])}), at most {report['plan']['max_new_tokens']} new tokens. Measured "
        f"{report['started'][:10]} on {where}; rows, plan and report in `benchmarks/results/{path.parent.parent.name}/"
        f"{path.parent.name}/`."
    )


def _control_line(report: dict[str, Any]) -> str:
    ratios = [cell["ratio"] for cell in report["summary"]["control"]]
    num_holding = sum(ratio["low"] <= 1.0 <= ratio["high"] for ratio in ratios)
    estimates = [ratio["estimate"] for ratio in ratios]
    return (
        f"A/A: plain against itself is {min(estimates):.2f} to {max(estimates):.2f} times as fast; 1 lies within the "
        f"interval at {num_holding} of {len(ratios)} loads and temperatures."
    )


def _implementations_line(path: Path) -> list[str]:
    """Returns a sentence on other implementations of the pair, where they were measured."""
    if not path.exists():
        return []
    summary = _load(path)["summary"]
    greedy = [c for c in summary["cells"] if c["kind"] is None and c["temperature"] == 0 and c["ratio"]]
    ratios = ", ".join(f"{cell['arm']} {_span(cell['ratio'])}" for cell in greedy)
    same = f"{sum(c['num_identical'] for c in greedy)} of {sum(c['num_compared'] for c in greedy)}"
    return [
        f"Against {summary['baseline']}' `generate` on the same weights, greedy, one at a time: {ratios}; {same} "
        f"answers are its own (`benchmarks/results/bench/{path.parent.name}/`)."
    ]


def _server_line(path: Path) -> list[str]:
    """Returns a sentence on a server that the benchmark started, where it was measured."""
    if not path.exists():
        return []
    cells = [c for c in _load(path)["summary"]["cells"] if c["kind"] is None and c["ratio"]]
    ratios = ", ".join(f"{_span(cell['ratio'])} at {cell['load']['concurrency']} at once" for cell in cells)
    tau = cells[0]["acceptance"]["length"]["estimate"]
    return [
        f"{cells[0]['arm']} over HTTP, the same drafter as a chain of 7 (τ {tau:.2f} by its own counts), against its "
        f"plain decoding: {ratios} (`benchmarks/results/bench/{path.parent.name}/`)."
    ]


def _calibration_line(path: Path) -> list[str]:
    """Returns a sentence on how often equal arms are called different, where it was computed."""
    if not path.exists():
        return []
    result = _load(path)
    equal, slower = result["equal"], result["slower"].values()
    held, trials = sum(equal["holds_1"].values()), len(equal["holds_1"]) * result["num_simulations"]
    found = sum(row["found_at_this_size"] for row in slower)
    return [
        f"Calibration on these rows: of {trials:,} simulated A/A comparisons {held:,} ({100 * held / trials:.1f} %) "
        f"say that there is no difference, and of {trials:,} with a planted slowdown of "
        f"{100 * max(row['slowdown'] for row in slower):.0f} % {found:,} find it (`benchmarks/results/{path.name}`)."
    ]


BLOCKS: dict[str, Callable[[Path], str]] = {
    "decode": decode_block,
    "exactness": exactness_block,
    "bench": bench_block,
}


def render(readme: str, results: Path) -> str:
    """Returns `readme` with each generated block written anew from `results`; all other text stays as it is.

    Raises:
        BlockError: an unknown block name, a marker without its partner, or a malformed result.
    """
    num_blocks = len(_BLOCK.findall(readme))
    if len(_MARKER.findall(readme)) != 2 * num_blocks:
        raise BlockError(
            "README.md: a begin:generated or end:generated marker has no partner of the same name"
        )
    return _BLOCK.sub(lambda match: match[1] + _block(match[2], results) + match[4], readme)


def _block(name: str, results: Path) -> str:
    if name not in BLOCKS:
        raise BlockError(f"README.md: block {name!r} is unknown; known blocks: {', '.join(BLOCKS)}")
    return BLOCKS[name](results)


def main(arguments: list[str] | None = None, readme: Path = README, results: Path = RESULTS) -> int:
    """Rewrites `readme`, or with `--check` only says whether it is current; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated blocks of README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where one is out of date")
    check = parser.parse_args(arguments).check
    before = readme.read_text(encoding="utf-8")
    try:
        after = render(before, results)
    except BlockError as error:
        print(error, file=sys.stderr)
        return 1
    if check and after != before:
        print("README.md: generated blocks are out of date; run `make tables`", file=sys.stderr)
        return 1
    if after != before:
        _write_atomically(readme, after)
    return 0


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
