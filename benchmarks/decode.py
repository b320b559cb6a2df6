"""Plain decoding, DFlash as chains, as small trees and beside lookup, and transformers, interleaved in one run.

    python benchmarks/decode.py [--data DIR] [--num-prompts 16] [--max-new-tokens 128] [--temperature 0.8]

For each held-out prompt, in an order that alternates: plain decoding, DFlash with chains of its own length, with trees,
with trees where prompt lookup finds nothing, and (on every fourth prompt) transformers' `generate` on the same weights.
Batch 1, greedily, then at the temperature (with a seed a prompt, so that texts can be compared). Rates count tokens
after the first one over the seconds after the first one; the ratio is plain seconds over DFlash seconds for the same
tokens. `--dtype bfloat16 --only-tokens` compares tokens where bfloat16 has no matrix products of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.core.acceptance import acceptance_length, survival
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request, StepRecord
from paceline.drafter.combined import Combined, sure_lookup
from paceline.engine.engine import Engine
from paceline.engine.runtime import machine, probe_rows
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM

SETS = ("gsm8k_test", "mbpp", "mt_bench", "support")


@dataclass
class Tally:
    """Sums over the prompts of one set and dtype."""

    num_prompts: int = 0
    num_identical: int = 0
    num_tokens: int = 0
    plain_s: float = 0.0
    dflash_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)

    def add(self, plain: Completion, dflash: Completion) -> None:
        """Counts one prompt. Mutates: self."""
        self.num_prompts += 1
        self.num_identical += plain.token_ids == dflash.token_ids
        self.num_tokens += max(0, len(plain.token_ids) - 1)
        self.plain_s += plain.decode_s
        self.dflash_s += dflash.decode_s
        self.steps += dflash.steps

    def merge(self, other: Tally) -> None:
        """Adds another tally's sums. Mutates: self."""
        self.num_prompts += other.num_prompts
        self.num_identical += other.num_identical
        self.num_tokens += other.num_tokens
        self.plain_s += other.plain_s
        self.dflash_s += other.dflash_s
        self.steps += other.steps

    def row(self, name: str, dtype: str) -> dict[str, Any]:
        """Returns the stored row."""
        length = acceptance_length(self.steps)
        return {
            "set": name,
            "dtype": dtype,
            "num_prompts": self.num_prompts,
            "identical": self.num_identical == self.num_prompts,
            "num_identical": self.num_identical,
            "num_tokens": self.num_tokens,
            "acceptance_length": round(length, 4) if length else None,
            "survival": [round(s, 4) for s in survival(self.steps)],
            "plain_tokens_per_s": round(self.num_tokens / self.plain_s, 2),
            "dflash_tokens_per_s": round(self.num_tokens / self.dflash_s, 2),
            "ratio": round(self.plain_s / self.dflash_s, 4),
        }


def load_prompts(folder: Path, name: str, count: int) -> list[str]:
    """Returns the first turns of the first `count` rows of a set."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    stride = max(1, len(rows) // count)  # spread over the file, since sets are ordered by topic
    return [row["turns"][0] for row in rows[::stride][:count]]


def complete(engine: Engine, ids: Sequence[int], params: SamplingParams) -> Completion:
    """Decodes one prompt."""
    engine.add(Request("r", tuple(ids), params))
    while engine.has_work:
        engine.step()
    return engine.take_completion("r")


def run_dtype(
    llm: LLM, arguments: argparse.Namespace, temperature: float, reference: Reference | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows of one dtype, by set and kind of draft, and the totals by kind of draft."""
    neural, nodes = llm.neural, llm.tree_nodes
    assert neural is not None
    dtype, rows = str(llm.dtype).removeprefix("torch."), []
    names = {
        "chain": f"chain of {neural.block_size - 1}",
        "tree": f"tree of {nodes}",
        "lookup": f"tree of {nodes}, lookup",
    }
    engines = {
        "plain": lambda: llm.new_engine(plain=True, max_sequences=1),
        "chain": lambda: llm.new_engine(tree_nodes=None, max_sequences=1),
    }
    if nodes is not None:  # not in bfloat16, unless asked for
        both = Combined(sure_lookup(), TreeDrafter(neural, nodes))
        engines["tree"] = lambda: llm.new_engine(max_sequences=1)
        engines["lookup"] = lambda: llm.new_engine(drafter=both, max_sequences=1)
    drafted = [kind for kind in engines if kind != "plain"]
    totals = {kind: Tally() for kind in drafted}
    for name in SETS:
        tallies = {kind: Tally() for kind in drafted}
        for i, prompt in enumerate(load_prompts(arguments.data, name, arguments.num_prompts)):
            params = SamplingParams(arguments.max_new_tokens, temperature=temperature, seed=i)
            ids, order = llm.render(prompt), list(engines)
            order = order[i % len(order) :] + order[: i % len(order)]
            done = {kind: complete(engines[kind](), ids, params) for kind in order}
            for kind, tally in tallies.items():
                tally.add(done["plain"], done[kind])
            if reference is not None and i % 4 == 0:
                reference.add(ids, done["plain"])
        for kind, tally in tallies.items():
            rows.append({"drafts": names[kind], **tally.row(name, dtype)})
            totals[kind].merge(tally)
            print(json.dumps(rows[-1]), flush=True)
    return rows, [{"drafts": names[kind], **tally.row("all", dtype)} for kind, tally in totals.items()]


class Reference:
    """transformers' `generate` on the same weights and prompts."""

    def __init__(self, folder: Path, dtype: torch.dtype, max_new_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._max_new_tokens = max_new_tokens
        self.num_tokens, self.seconds, self.own_s, self.num_identical, self.num_prompts = 0, 0.0, 0.0, 0, 0

    def add(self, ids: Sequence[int], own: Completion) -> None:
        """Generates the same text and counts both times, prefill included on both sides. Mutates: self."""
        started = time.perf_counter()
        prompt = torch.tensor([list(ids)])
        with torch.inference_mode():
            out = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self._max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        self.seconds += time.perf_counter() - started
        self.own_s += own.prefill_s + own.decode_s
        new = out[0, len(ids) :].tolist()
        self.num_tokens += len(new)
        self.num_prompts += 1
        self.num_identical += tuple(new) == own.token_ids

    def row(self) -> dict[str, Any]:
        """Returns the stored row."""
        return {
            "num_prompts": self.num_prompts,
            "num_identical": self.num_identical,
            "transformers_tokens_per_s": round(self.num_tokens / self.seconds, 2),
            "plain_tokens_per_s": round(self.num_tokens / self.own_s, 2),
            "ratio": round(self.seconds / self.own_s, 4),
        }


def batch_rates(llm: LLM, folder: Path, batches: Sequence[int], max_new_tokens: int) -> list[dict[str, Any]]:
    """Returns plain tokens per second by batch size, prefill included."""
    prompts = [p for name in SETS for p in load_prompts(folder, name, max(batches) // len(SETS) + 1)]
    rows = []
    for batch in batches:
        engine = llm.new_engine(plain=True, max_sequences=batch)
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        for i in range(batch):
            engine.add(Request(str(i), tuple(llm.render(prompts[i % len(prompts)])), params))
        engine.step()  # prefill and one step
        started, count = time.perf_counter(), 0
        while engine.has_work:
            count += sum(len(delta.token_ids) for delta in engine.step())
        rows.append({"batch": batch, "tokens_per_s": round(count / (time.perf_counter() - started), 2)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Runs the benchmark and stores its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tree-nodes", type=int, help="nodes of a tree; what pays here if not given")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--only-tokens", action="store_true", help="leave transformers and batches out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    llm = LLM(drafter=arguments.drafter, dtype=arguments.dtype, tree_nodes=arguments.tree_nodes or "auto")
    if llm.checkpoint is None:
        raise SystemExit("no drafter; hint: --drafter FOLDER")
    for plain in (True, False):  # warm up
        complete(llm.new_engine(plain=plain), llm.render("Say hello."), SamplingParams(max_new_tokens=16))
    whole = not arguments.only_tokens
    reference = Reference(llm.folder, llm.dtype, arguments.max_new_tokens) if whole else None
    rows, totals = run_dtype(llm, arguments, 0.0, reference)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "max_new_tokens": arguments.max_new_tokens,
        "row_invariance": probe_rows(llm.target).verdict,
        "drafter": {k: llm.checkpoint.provenance.get(k) for k in ("num_steps", "num_blocks", "held_out")},
        "rows": rows,
        "totals": totals,
    }
    if reference is not None:
        drawn, drawn_totals = run_dtype(llm, arguments, arguments.temperature, None)
        result["sampled"] = {"temperature": arguments.temperature, "rows": drawn, "totals": drawn_totals}
        result["transformers"] = reference.row()
        result["batch"] = batch_rates(llm, arguments.data, (1, 8, 64), 48)
    out = arguments.out or Path(f"benchmarks/results/decode_{arguments.dtype}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(totals, indent=1))


if __name__ == "__main__":
    main()
