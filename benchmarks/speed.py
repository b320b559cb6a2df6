"""How fast decoding is: against the memory's speed, against plain decoding, and against other engines.

    python benchmarks/speed.py plain       plain decoding against the bandwidth floor and transformers' generate
    python benchmarks/speed.py rows        passes of 2 to 32 rows, chains and trees, against a plain pass
    python benchmarks/speed.py pairs       the pair as LLM() has it against its own plain decoding, on five sets
    python benchmarks/speed.py engines     the same pair in other engines, in turns with ours
    python benchmarks/speed.py cells       twelve kinds of work in batches of 1 to 16: is it ever slower than plain?
    python benchmarks/speed.py growth      contexts up to 8k tokens, batches up to 32
    python benchmarks/speed.py write       docs/speed.md and its figure from what is stored

Each part measures its arms in turns, prompt by prompt, and replaces its own place in benchmarks/results/speed.json.
`pairs`, `cells` and `growth` may be measured in pieces (`--sets`, `--cells`, `--contexts`, `--batches`): their rows are
merged where machine and settings are the same. A row holds every sample; ratios and their intervals, a bootstrap over
prompts (batches, rounds, slices) with both arms of one drawn together, are computed from these.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline.engine.runtime import machine
from paceline.llm import LLM
from speed_engines import Places as Engines
from speed_engines import measure_engines
from speed_pairs import (
    CONTEXTS,
    GROWTH_BATCHES,
    SETS,
    Places,
    chosen_cells,
    measure_cells,
    measure_growth,
    measure_pairs,
    warm_up,
    whole_batches,
)
from speed_passes import measure_plain, measure_rows
from speed_results import PIECEWISE, RESULT, MixedPartError, Row, merged, store, stored, without_folders
from speed_tables import write
from speed_timing import prompts_of

Prompts = list[tuple[int, ...]]


def mixed_prompts(llm: LLM, arguments: argparse.Namespace) -> Prompts:
    """Returns prompts of all sets in turn, as many in all as asked for."""
    each = whole_batches(arguments.num_prompts, len(SETS)) // len(SETS)
    by_set = [prompts_of(arguments.data / f"{name}.jsonl", each, llm.render) for name in SETS]
    return [prompt for group in zip(*by_set, strict=True) for prompt in group][: arguments.num_prompts]


def run_plain(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields the one row of part `plain`."""
    yield measure_plain(llm, mixed_prompts(llm, arguments), arguments.max_new_tokens)


def run_rows(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Returns the rows of part `rows`; a prompt is a round."""
    return measure_rows(llm, mixed_prompts(llm, arguments), arguments.num_prompts)


def run_pairs(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of part `pairs`."""
    return measure_pairs(llm, _places(arguments), arguments.sets, arguments.batches)


def run_cells(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of part `cells`."""
    return measure_cells(llm, _places(arguments), chosen_cells(arguments.cells))


def _places(arguments: argparse.Namespace) -> Places:
    return Places(
        arguments.data, arguments.num_prompts, arguments.max_new_tokens, tuple(arguments.temperatures)
    )


def run_engines(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields the one row of part `engines`."""
    places = Engines(
        vllm_python=arguments.vllm_python,
        vllm_eager=not arguments.vllm_compiled,
        openvino_python=arguments.openvino_python,
        openvino_folder=arguments.openvino_folder,
        llama_python=arguments.llama_python,
        llama_cli=arguments.llama_cli,
        gguf=arguments.gguf,
        timeout_s=arguments.timeout_s,
    )
    yield measure_engines(llm, mixed_prompts(llm, arguments), arguments.max_new_tokens, places)


def run_growth(llm: LLM, arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of part `growth`."""
    return measure_growth(
        llm, arguments.data, arguments.max_new_tokens, arguments.contexts, arguments.batches
    )


RUNS: dict[str, Callable[[LLM, argparse.Namespace], Iterable[Row]]] = {
    "plain": run_plain,
    "rows": run_rows,
    "pairs": run_pairs,
    "engines": run_engines,
    "cells": run_cells,
    "growth": run_growth,
}


def measure(name: str, arguments: argparse.Namespace) -> None:
    """Measures a part and stores it; of a part in pieces each row as soon as it is there."""
    llm = LLM(drafter=arguments.drafter, dtype=arguments.dtype, max_sequences=32)
    if llm.neural is None:
        raise SystemExit("no drafter; hint: --drafter FOLDER")
    warm_up(llm)
    found: dict[str, Any] = {
        "command": without_folders(" ".join(["python", *sys.argv])),
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "settings": settings(llm, arguments),
        "rows": [],
    }
    try:
        merged(stored(arguments.out), name, found, arguments.fresh)  # refuses before anything is measured
        for row in RUNS[name](llm, arguments):
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            if name in PIECEWISE:
                store(arguments.out, name, found, arguments.fresh)
        store(arguments.out, name, found, arguments.fresh)
    except MixedPartError as error:
        raise SystemExit(str(error)) from error


def settings(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what pieces of a part must have alike."""
    return {
        "num_prompts": arguments.num_prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "drafter": arguments.drafter,
        "tree_nodes": llm.tree_nodes,
        "exact": llm.exact,
    }


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="part", required=True)
    writes = commands.add_parser("write")
    writes.add_argument("--out", type=Path, default=RESULT, help="the stored result")
    counts = {"plain": (15, 64), "rows": (20, 0), "pairs": (16, 96), "engines": (10, 64)}
    counts |= {"cells": (4, 48), "growth": (1, 96)}
    parts = {}
    for name, (num_prompts, max_new_tokens) in counts.items():
        part = parts[name] = commands.add_parser(name)
        part.add_argument("--data", type=Path, default=Path("../shared/data"))
        part.add_argument("--drafter", default="auto")
        part.add_argument("--dtype", default="float32")
        part.add_argument("--num-prompts", type=int, default=num_prompts, help="rounds, in `rows`")
        part.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
        part.add_argument("--out", type=Path, default=RESULT)
        part.add_argument("--fresh", action="store_true", help="drop what is stored of the part")
    parts["pairs"].add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parts["pairs"].add_argument("--batches", nargs="+", type=int, default=(1, 8))
    parts["pairs"].add_argument("--temperatures", nargs="+", type=float, default=(0.0, 0.8))
    parts["cells"].add_argument("--cells", nargs="+", default=(), help="KIND, KIND:BATCH or *:BATCH")
    parts["cells"].add_argument("--temperatures", nargs="+", type=float, default=(0.0,))
    parts["growth"].add_argument("--contexts", nargs="*", type=int, default=CONTEXTS)
    parts["growth"].add_argument("--batches", nargs="*", type=int, default=GROWTH_BATCHES)
    for kind in ("vllm", "openvino", "llama"):
        parts["engines"].add_argument(f"--{kind}-python", type=Path, help="a Python that has it")
    parts["engines"].add_argument("--vllm-compiled", action="store_true", help="with its graph compiler")
    parts["engines"].add_argument("--openvino-folder", type=Path, help="exported models, made if missing")
    parts["engines"].add_argument("--llama-cli", type=Path, help="llama-completion, or an older llama-cli")
    parts["engines"].add_argument("--gguf", type=Path, help="llama.cpp's model")
    parts["engines"].add_argument("--timeout-s", type=float, default=900.0, help="of one answer")
    return parser


def main() -> None:
    """Measures a part, or writes."""
    arguments = parser().parse_args()
    if arguments.part == "write":
        write(stored(arguments.out))
    else:
        measure(arguments.part, arguments)


if __name__ == "__main__":
    main()
