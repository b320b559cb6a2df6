"""Checks on a CUDA device that texts are right, and times what speculation costs and gives there.

    python scripts/check_on_gpu.py OUT.json --target FOLDER [--drafter FOLDER] [--minutes 5]
    python scripts/check_on_gpu.py OUT.json --tiny           all of it with tiny shapes on the CPU: a test of the script

Nothing is fetched: FOLDER is a transformers folder (or a GGUF file) that is there, the drafter by default the one of
this repository. What is measured:

    parity      texts of the pair in float32 against a CPU's, token by token, and in bfloat16, where the logits of every
                token that differs are compared: within NEAR_TIE they are called a near-tie
    pair        tokens per second and tau of the pair, plain and with its drafter, with recorded passes and without
    steps       whole steps of a random pair, a Llama-shaped target of 8 billion parameters and a drafter of 5 layers:
                from them tau at which speculation breaks even, and the speed-up that published tau would give, beside
                the published one
    passes      that target's passes, by rows and sequences, and its drafter's drafts
    attention   which of PyTorch's kernels are how fast for one layer's attention

OUT.json is brought up to date after every part. A part for which no time is left is named and left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]  # there, nothing is installed

import torch  # noqa: E402
from gpu_pairs import TINY, WHOLE, Pair, Sizes, random_pair, stored_pair  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from paceline.core.acceptance import acceptance_length  # noqa: E402
from paceline.core.attention import attend_grouped, grouped_mask  # noqa: E402
from paceline.core.errors import PacelineError  # noqa: E402
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal  # noqa: E402
from paceline.engine.runtime import choose_device, machine, synchronize  # noqa: E402
from paceline.target.base import VerifyRows  # noqa: E402
from paceline.target.native import NativeTarget  # noqa: E402

DRAFTER = ROOT / "src" / "paceline" / "data" / "drafters" / "smollm2-135m-instruct"
NEAR_TIE = 0.5
"""Logits nearer than this may change places in bfloat16, whose steps are 0.06 to 0.25 where logits are 16 to 64."""
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "A train covers 60 km in 40 minutes. How fast is it in km/h?",
    "Tell a story about a lighthouse in four sentences.",
    "Name five rivers in Europe and the seas they reach.",
    "Explain binary search to a child.",
    "Translate 'good morning, how are you?' into French and German.",
    "Write a haiku about autumn.",
)

BATCHES = (1, 4, 8, 16, 32)
PUBLISHED = (
    ("Qwen3-8B, GSM8K, Transformers, H200", 6.54, (5.15, None, None, None, None)),
    ("Qwen3-8B, MATH500, Transformers, H200", 7.87, (6.08, None, None, None, None)),
    ("Qwen3-8B, MT-Bench, Transformers, H200", 4.24, (2.75, None, None, None, None)),
    ("Qwen3-8B, MATH500, SGLang, B200", 8.01, (5.1, 4.5, 4.5, 3.9, 2.8)),
    ("Qwen3-8B, HumanEval, SGLang, B200", 6.50, (4.2, 3.6, 3.6, 3.0, 2.4)),
    ("Llama-3.1-8B, GSM8K, SGLang, B200", 4.32, (2.4, 2.2, 2.1, 1.8, 1.6)),
    ("Llama-3.1-8B, HumanEval, SGLang, B200", 4.91, (2.8, 2.6, 2.5, 2.1, 1.8)),
    ("Llama-3.1-8B, Alpaca, SGLang, B200", 3.73, (2.2, 2.0, 1.8, 1.5, 1.4)),
)
"""Where, tau and speed-ups at BATCHES concurrent requests, temperature 0: DFlash (arXiv 2602.06036), main results
(blocks of 16) and the comparison on EAGLE-3's training data (Llama-3.1-8B, blocks of 10)."""

log = logging.getLogger("check_on_gpu")


# Parts ---------------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """What all parts share."""

    sizes: Sizes
    device: torch.device
    prompts: list[list[int]]
    load: Callable[[torch.device, torch.dtype], Pair]

    @cached_property
    def random(self) -> Pair:
        """The pair of random weights."""
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return random_pair(self.sizes, self.device, dtype)


def parity(check: Check) -> dict[str, Any]:
    """Returns how many tokens are those that a CPU says in float32, and how near the logits of the others are."""
    reference = check.load(torch.device("cpu"), torch.float32)
    num_tokens, batch = check.sizes.new_tokens, len(check.prompts)
    expected = reference.decode(check.prompts, num_tokens, plain=True, batch=batch)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        pair = check.load(check.device, dtype)
        for recorded in (False, True):
            pair.record(recorded)
            for plain in (True, False):
                texts = pair.decode(check.prompts, num_tokens, plain=plain, batch=batch)
                name = f"{_name(dtype)} {'plain' if plain else 'dflash'}{' recorded' if recorded else ''}"
                found[name] = _compare(reference.target, expected, texts)
                log.info("parity: %-28s %s", name, found[name])
    return found


def _compare(
    target: NativeTarget, expected: Sequence[Completion], texts: Sequence[Completion]
) -> dict[str, Any]:
    gaps, num_equal = [], 0
    for one, other in zip(expected, texts, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        num_equal += len(pairs) if first is None else first
        if first is not None:
            gaps.append(_gap(target, [*one.prompt_ids, *one.token_ids[:first]], *pairs[first]))
    return {
        "num_texts": len(texts),
        "num_equal_texts": len(texts) - len(gaps),
        "num_equal_tokens": num_equal,
        "gaps": [round(gap, 5) for gap in gaps],
        "near_ties_only": all(gap < NEAR_TIE for gap in gaps),
    }


def _gap(target: NativeTarget, ids: Sequence[int], said: int, other: int) -> float:
    """Returns by how much the target prefers the token that it said to another one."""
    session = target.open(len(ids))
    try:
        (output,) = target.verify([VerifyRows(session, ids, EMPTY_PROPOSAL, last_row_only=True)])
    finally:
        session.close()
    return float(output.logits[0, said] - output.logits[0, other])


def pair_speed(check: Check) -> list[dict[str, Any]]:
    """Returns tokens per second and tau of the pair."""
    rows = []
    pair = check.load(check.device, torch.float32 if check.device.type == "cpu" else torch.bfloat16)
    for batch in (1, len(check.prompts)):
        for plain in (True, False):
            for recorded in (False, True):
                graphs = pair.record(recorded)
                for _ in range(2):  # the first warms up and records
                    texts = pair.decode(check.prompts, check.sizes.new_tokens, plain=plain, batch=batch)
                rows.append(
                    {
                        "batch": batch,
                        "plain": plain,
                        "recorded": recorded,
                        "tokens_per_s": _tokens_per_s(texts, batch),
                        "tau": acceptance_length([step for text in texts for step in text.steps]),
                        "num_recorded": graphs.num_recorded if graphs else 0,
                    }
                )
                log.info("pair: %s", rows[-1])
    return rows


def _tokens_per_s(texts: Sequence[Completion], batch: int) -> float:
    """Returns tokens per second of decoding; sequences that step together share their seconds."""
    num_tokens = sum(len(text.token_ids) - 1 for text in texts)
    return num_tokens / max(1e-9, sum(text.decode_s for text in texts) / min(batch, len(texts)))


def passes(check: Check) -> dict[str, Any]:
    """Returns seconds of a pass by rows and sequences, recorded and not, and of a draft."""
    pair, sizes = check.random, check.sizes
    room = sizes.context + max(*sizes.rows, sizes.block_size)
    sessions = [pair.target.open(room) for _ in range(max(sizes.batches))]
    for session in sessions:
        session.keep(range(sizes.context))  # K/V of zeros take as long as any
    found: dict[str, Any] = {"context": sizes.context, "verify_s": [], "draft_s": []}
    for recorded in (True, False):
        pair.record(recorded)
        contexts = [pair.drafter.open(room) for _ in sessions]
        for context in contexts:
            context.length = sizes.context
        for batch in sizes.batches:
            for rows in sizes.rows if recorded else (1, sizes.block_size):
                parts = [VerifyRows(s, [1], Proposal.chain([2] * (rows - 1))) for s in sessions[:batch]]
                seconds = timed(check, partial(pair.target.verify, parts))
                found["verify_s"].append({"recorded": recorded, "batch": batch, "rows": rows, "s": seconds})
            draft = partial(pair.drafter.draft, [1] * batch, contexts[:batch], sizes.block_size - 1)
            seconds = timed(check, draft)
            found["draft_s"].append({"recorded": recorded, "batch": batch, "s": seconds})
            log.info("passes: batch %d, recorded %s, draft %.2f ms", batch, recorded, 1000 * seconds)
    for session in sessions:
        session.close()
    return found


def timed(check: Check, call: Callable[[], object]) -> float:
    """Returns the median seconds of a call, the device's work included; the first calls do not count."""
    seconds = []
    for _ in range(check.sizes.repeats + 2):
        synchronize(check.device)
        started = time.perf_counter()
        call()
        synchronize(check.device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])


def steps(check: Check) -> list[dict[str, Any]]:
    """Returns seconds of whole steps by batch, tau that breaks even, and speed-ups at published tau.

    A step drafts, verifies, samples, keeps and injects whatever is accepted; with random weights nearly nothing is.
    """
    pair, sizes, found = check.random, check.sizes, []
    pair.record(True)
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(sizes.big.vocab_size, (sizes.context,), generator=rng).tolist()
    for batch in (b for b in BATCHES if b <= max(sizes.batches)):
        num_tokens = sizes.step_tokens + 4 * batch  # so that all of them run together for a while
        seconds = {}
        for plain in (True, False):
            for _ in range(2):  # the first warms up and records
                texts = pair.decode([prompt] * batch, num_tokens, plain=plain, batch=batch)
            seconds[plain] = _step_s(texts, batch)
        published = [_published(batch, seconds[True] / seconds[False], *line) for line in PUBLISHED]
        row = {
            "batch": batch,
            "plain_s": seconds[True],
            "dflash_s": seconds[False],
            "break_even_tau": seconds[False] / seconds[True],
            "published": published,
        }
        log.info("steps: batch %d, break-even tau %.2f", batch, row["break_even_tau"])
        for line in published:
            log.info("  %(where)-40s tau %(tau).2f: %(speedup).2f, published %(published_speedup)s", line)
        found.append(row)
    return found


def _published(
    batch: int, speedup_per_tau: float, where: str, tau: float, speedups: Sequence[float | None]
) -> dict[str, Any]:
    return {
        "where": where,
        "tau": tau,
        "speedup": tau * speedup_per_tau,
        "published_speedup": speedups[BATCHES.index(batch)],
    }


def _step_s(texts: Sequence[Completion], batch: int) -> float:
    """Returns the median seconds of the steps that all texts shared."""
    steps = [step for text in texts for step in text.steps if step.num_sequences == batch]
    return median(s.draft_s + s.verify_s + s.sample_s + s.inject_s + s.keep_s for s in steps)


def attention(check: Check) -> list[dict[str, Any]]:
    """Returns seconds of one layer's attention by kernel."""
    shape, sizes, found = check.sizes.big, check.sizes, []
    dtype = torch.float32 if check.device.type == "cpu" else torch.bfloat16
    group, length = shape.num_heads // shape.num_kv_heads, 64 * (sizes.context // 64 + 1)
    for batch in (1, max(sizes.batches)):
        like = torch.zeros(1, device=check.device, dtype=dtype)
        q = like.new_ones(batch, sizes.block_size, shape.num_heads, shape.head_dim)
        kv = like.new_ones(batch, shape.num_kv_heads, length, shape.head_dim)
        seen = torch.arange(length, device=check.device) < sizes.context
        mask = grouped_mask(seen.expand(batch, sizes.block_size, -1), group, 1, dtype)
        for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH"):
            row: dict[str, Any] = {"batch": batch, "kernel": name, "length": length}
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    row["s"] = timed(check, partial(attend_grouped, q, kv, kv, mask))
            except RuntimeError as error:  # PyTorch has no such kernel for masks, or for this device
                row["refused"] = str(error).splitlines()[0][:120]
            found.append(row)
            log.info("attention: %s", row)
    return found


PARTS: dict[str, Callable[[Check], Any]] = {
    "parity": parity,
    "pair": pair_speed,
    "steps": steps,
    "passes": passes,
    "attention": attention,
}
NEEDED_S = {"parity": 40, "pair": 30, "steps": 50, "passes": 50, "attention": 10}
"""About how long a part takes on a fast device; less than this left, and it is left out."""


def run(check: Check, out: Path, minutes: float) -> dict[str, Any]:
    """Does all parts for which there is time and returns what `out` then holds."""
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "device": str(check.device), "left_out": [], "seconds": {}}
    for name, part in PARTS.items():
        started = time.monotonic()
        if 60 * minutes - (started - began) < NEEDED_S[name]:
            log.info("%s: no time left", name)
            found["left_out"].append(name)
        else:
            found[name] = part(check)
            found["seconds"][name] = round(time.monotonic() - started, 1)
        partial_out = out.with_suffix(".partial")
        partial_out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        os.replace(partial_out, out)
    return found


def new_check(target: Path | None, drafter: Path) -> Check:
    """Returns the check of a stored pair on the best device, or the tiny one on the CPU where no target is given."""
    if target is None:
        rng = torch.Generator().manual_seed(1)
        tiny_prompts = torch.randint(TINY.big.vocab_size, (3, 9), generator=rng).tolist()
        small = replace(TINY, big=replace(TINY.big, eos_token_ids=(2,)))
        return Check(TINY, torch.device("cpu"), tiny_prompts, partial(random_pair, small))
    from paceline.target.pull import pull
    from paceline.target.text import TextCodec

    folder = pull(str(target), offline=True)
    codec = TextCodec.load(folder)
    prompts = [codec.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    return Check(WHOLE, choose_device("cuda"), prompts, partial(stored_pair, folder, drafter))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns its exit status: 1 where texts differ by more than near-ties."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, help="transformers folder or GGUF file")
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, no target needed")
    given = parser.parse_args(arguments)
    if given.tiny == (given.target is not None):
        parser.error("expected either --target or --tiny")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        found = run(new_check(given.target, given.drafter), given.out, given.minutes)
    except PacelineError as error:
        log.error("error: %s", error)
        return 1
    bad = [
        name
        for name, row in found.get("parity", {}).items()
        if row["gaps"] and (name.startswith("float32 ") or not row["near_ties_only"])
    ]
    log.info("texts differ: %s", ", ".join(bad) if bad else "none by more than near-ties in bfloat16")
    return 1 if bad else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
