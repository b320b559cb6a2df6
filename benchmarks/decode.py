"""Plain decoding, DFlash and transformers on held-out prompts, interleaved in one run.

    python benchmarks/decode.py [--data DIR] [--num-prompts 16] [--max-new-tokens 128]

For each prompt, in turn and with the order alternating: plain decoding, DFlash, and (on every fourth prompt)
transformers' `generate` on the same weights. Batch 1, temperature 0. Rates count tokens after the first one over the
seconds after the first one. A second pass in bfloat16 compares token ids only where bfloat16 is emulated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.core.acceptance import acceptance_length, survival
from paceline.core.types import Completion, Request, SamplingParams, StepRecord
from paceline.engine.runtime import machine, probe_rows
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


def complete(llm: LLM, ids: Sequence[int], params: SamplingParams, *, plain: bool) -> Completion:
    """Decodes one prompt."""
    engine = llm.new_engine(plain=plain, max_sequences=1)
    engine.add(Request("r", tuple(ids), params))
    while engine.has_work:
        engine.step()
    return engine.take_completion("r")


def run_dtype(
    llm: LLM, folder: Path, arguments: argparse.Namespace, reference: Reference | None
) -> list[dict[str, Any]]:
    """Returns the rows of one dtype: one per set, and the total."""
    dtype, total, rows = str(llm.dtype).removeprefix("torch."), Tally(), []
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens)
    for name in SETS:
        tally = Tally()
        for i, prompt in enumerate(load_prompts(folder, name, arguments.num_prompts)):
            ids, done = llm.render(prompt), {}
            for plain in (True, False) if i % 2 == 0 else (False, True):
                done[plain] = complete(llm, ids, params, plain=plain)
            tally.add(done[True], done[False])
            if reference is not None and i % 4 == 0:
                reference.add(ids, done[True])
        rows.append(tally.row(name, dtype))
        total.merge(tally)
        print(json.dumps(rows[-1]), flush=True)
    return [*rows, total.row("total", dtype)]


class Reference:
    """transformers' `generate` on the same weights and prompts."""

    def __init__(self, folder: Path, max_new_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.json"))
    arguments = parser.parse_args()
    rows, totals, probes = [], {}, {}
    result: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        llm = LLM(drafter=arguments.drafter, dtype=dtype, block_size=arguments.block_size)
        if llm.checkpoint is None:
            raise SystemExit("no drafter; hint: --drafter FOLDER")
        complete(llm, llm.render("Say hello."), SamplingParams(max_new_tokens=8), plain=False)
        reference = Reference(llm.folder, arguments.max_new_tokens) if dtype == "float32" else None
        *sets, totals[dtype] = run_dtype(llm, arguments.data, arguments, reference)
        rows += sets
        probes[dtype] = probe_rows(llm.target).verdict
        if reference is not None:
            result["transformers"] = reference.row()
            result["batch"] = batch_rates(llm, arguments.data, (1, 8, 64), 48)
        result["block_size"] = llm.new_engine().block_size
        result["drafter"] = {
            k: llm.checkpoint.provenance.get(k) for k in ("num_blocks", "train_seconds", "held_out")
        }
    first = arguments.dtypes[0]
    result = {
        "command": "python benchmarks/decode.py",
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "max_new_tokens": arguments.max_new_tokens,
        "row_invariance": probes,
        **result,
        "rows": rows,
        "totals": totals,
        "total": totals[first],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(totals, indent=1))


if __name__ == "__main__":
    main()
