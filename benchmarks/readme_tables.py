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
    "| prompts | dtype | same tokens | acceptance length τ | plain tok/s | DFlash tok/s | ratio |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)


class BlockError(ValueError):
    """A block or a result that is not what this file knows how to write."""


def decode_block(results: Path) -> str:
    """Returns the table of `decode.json` in `results`, or a sentence that says nothing was measured yet.

    Raises:
        BlockError: the file is not the shape that benchmarks/README.md describes.
    """
    path = results / "decode.json"
    if not path.exists():
        return f"Not measured yet: `make bench` writes `benchmarks/results/{path.name}`, and this table from it.\n"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = [_decode_row(row) for row in result["rows"]]
        total = _decode_row({**result["total"], "set": "**all**"})
        source = _source_line(result)
    except (KeyError, TypeError, ValueError) as error:
        raise BlockError(
            f"{path}: expected the shape in benchmarks/README.md, got {error!r}; run `make bench` again"
        ) from error
    return "\n".join([_HEADER, *rows, total, "", source, ""])


def _decode_row(row: dict[str, Any]) -> str:
    if row["identical"] != (row["num_identical"] == row["num_prompts"]):
        raise ValueError(f"{row['set']}: identical is {row['identical']}, but the counts say otherwise")
    cells = (
        row["set"],
        row["dtype"],
        f"{row['num_identical']} of {row['num_prompts']}",
        f"{row['acceptance_length']:.2f}",
        f"{row['plain_tokens_per_s']:.1f}",
        f"{row['dflash_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}×",
    )
    return "| " + " | ".join(cells) + " |"


def _source_line(result: dict[str, Any]) -> str:
    where = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    return f"Measured {result['date']} by `{result['command']}` on {where}; stored in `benchmarks/results/decode.json`."


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
