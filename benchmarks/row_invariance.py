"""What it costs that a tree's rows have the bits of plain decoding, and which kinds of passes keep their bits.

    python benchmarks/row_invariance.py [--contexts 100 400 1500] [--nodes 5 8 15] [--num-passes 21]

One target and one thread. Passes over the same rows behind the same context take turns: plain decoding, a chain, the
tree walked path by path, and the tree in one attention call, whose branches sum their keys in another order. Times are
medians; the price is the median of the pairs' ratios. Trees are grown as in decoding, from equal slots.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.core.tree import grow
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.engine.runtime import machine, probe_rows
from paceline.engine.step import PREFILL_ROWS
from paceline.llm import LLM
from paceline.target.base import VerifyRows
from paceline.target.native import NativeSession, NativeTarget
from paceline.target.plan import walk

SLOT_PROBABILITIES = (0.35, 0.2, 0.12, 0.08, 0.05)
"""Of a slot's likeliest tokens; trees then have about as many paths as those of the drafter that ships."""


def draft_tree(num_nodes: int, vocab_size: int) -> Proposal:
    """Returns the tree of the likeliest paths under independent, equal slots. Pure."""
    rng = random.Random(num_nodes)
    log_probs = [[float(p) for p in torch.tensor(SLOT_PROBABILITIES).log()]] * num_nodes
    tokens = [[rng.randrange(vocab_size) for _ in SLOT_PROBABILITIES] for _ in range(num_nodes)]
    return grow(log_probs, tokens, num_nodes)


def open_at(target: NativeTarget, length: int) -> NativeSession:
    """Returns a session that holds `length` random tokens."""
    rng, session = random.Random(length), target.open(length + 64)
    while session.length < length:
        count = min(PREFILL_ROWS, length - session.length)
        ids = [rng.randrange(target.spec.vocab_size) for _ in range(count)]
        target.verify([VerifyRows(session, ids, EMPTY_PROPOSAL, last_row_only=True)])
        session.keep(range(count))
    return session


def take_turns(passes: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Returns each pass's milliseconds, round by round; the order rotates, and the first round is not counted."""
    names, taken = list(passes), {name: list[float]() for name in passes}
    for turn in range(num_rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            passes[name]()
            taken[name].append(1e3 * (time.perf_counter() - started))
    return {name: times[1:] for name, times in taken.items()}


def measure(target: NativeTarget, session: NativeSession, num_nodes: int, num_rounds: int) -> dict[str, Any]:
    """Returns the stored row of one context and tree."""
    tree = draft_tree(num_nodes, target.spec.vocab_size)

    def runner(drafts: Proposal, exact: bool = True) -> Callable[[], object]:
        def run() -> None:
            target.exact = exact
            target.verify([VerifyRows(session, [1], drafts)])

        return run

    times = take_turns(
        {
            "plain": runner(EMPTY_PROPOSAL),
            "chain": runner(Proposal.chain(tree.tokens)),
            "tree": runner(tree),
            "tree_in_one_call": runner(tree, exact=False),
        },
        num_rounds,
    )
    target.exact = True
    pairs = zip(times["tree"], times["tree_in_one_call"], strict=True)
    return {
        "context": session.length,
        "num_nodes": num_nodes,
        "num_paths": len(walk(VerifyRows(session, [1], tree))),
        **{f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()},
        "price": round(statistics.median(a / b for a, b in pairs) - 1, 4),
    }


def main() -> None:
    """Runs the benchmark and stores its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 400, 1500])
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 8, 15])
    parser.add_argument("--num-passes", type=int, default=21)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/row_invariance.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = LLM(drafter=None, dtype=arguments.dtype).target
    if not isinstance(target, NativeTarget):
        raise SystemExit("the native runner is what is measured here")
    rows = []
    for context in arguments.contexts:
        session = open_at(target, context)
        for num_nodes in arguments.nodes:
            rows.append(measure(target, session, num_nodes, arguments.num_passes))
            print(json.dumps(rows[-1]), flush=True)
        session.close()
    bits = {}
    for name, exact in (("exact", True), ("trees_in_one_call", False)):
        target.exact = exact
        bits[name] = probe_rows(target).kinds
        print(name, json.dumps(bits[name]), flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "dtype": arguments.dtype,
        "bit_exact": bits,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
