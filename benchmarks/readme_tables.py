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


BLOCKS: dict[str, Callable[[Path], str]] = {"decode": decode_block}


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
