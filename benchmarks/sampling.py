"""Which keyed draw: what it costs beside a step, and how often a draft that knows it is right.

    python benchmarks/sampling.py [--data DIR] [--num-prompts 8] [--max-new-tokens 64] [--temperature 1.0]

Three questions on the real pair, at a temperature above 0:
- cost: seconds of `Law.choose` on 16 rows over those of a step of 16 rows (the draft of a tree of 15 nodes and the
  verify pass), interleaved, for several requests; beside them one uniform number and the inverse CDF, the other keyed
  draw that was considered;
- coupling: along the target's own texts, the chance that the first draft behind an anchor is the drawn token: when
  it is the drafter's likeliest token, when both draw with one uniform number by inverse CDF (exact overlap of the
  intervals), when both draw with the same Gumbel noise (mean over keys);
- acceptance length τ of whole texts, drafts being the likeliest tokens or keyed, which is what `keyed_drafts` chooses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from decode import SETS, load_prompts
from paceline.core.acceptance import acceptance_length
from paceline.core.noise import gumbel_row
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request
from paceline.drafter.dflash import DFlash
from paceline.engine.runtime import machine
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM
from paceline.target.base import VerifyRows

ROWS = 16
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95 at 1.5": {"top_p": 0.95, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
}


def inverse_cdf(logits_RV: torch.Tensor, draws_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the tokens whose interval of the cumulative distribution holds each draw."""
    cdf_RV = (logits_RV.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cdf_RV, draws_R[:, None] * cdf_RV[:, -1:], right=True)[:, 0]


def costs(llm: LLM, prompt: Sequence[int], temperature: float, repeats: int) -> list[dict[str, Any]]:
    """Returns the share of a 16-row step that each kind of request adds, medians of interleaved repeats."""
    assert llm.neural is not None
    target, drafter = llm.target, TreeDrafter(llm.neural, ROWS - 1)
    target.tap(drafter.target_layer_ids)
    session, context = target.open(len(prompt) + 4 * ROWS), drafter.open(len(prompt) + 4 * ROWS)
    try:
        (prefilled,) = target.verify([VerifyRows(session, prompt[:-1], EMPTY_PROPOSAL, last_row_only=True)])
        session.keep(range(len(prompt) - 1))
        drafter.inject([context], [prefilled.hidden], [prompt[:-1]])
        proposal = Proposal.chain(list(prompt[: ROWS - 1]))
        part = VerifyRows(session, prompt[-1:], proposal)
        (output,) = target.verify([part])
        laws = {
            name: Law(
                SamplingParams(**{"temperature": temperature, "seed": 1, **options}),
                target.spec.vocab_size,
                seed=1,
                num_prompt_tokens=len(prompt) - 20,
            )
            for name, options in REQUESTS.items()
        }
        draws = torch.rand(ROWS, dtype=torch.float64)
        kinds: dict[str, Callable[[], object]] = {
            "pass": lambda: target.verify([part]),
            "draft": lambda: drafter.draft(prompt[-1:], [context], ROWS - 1),
        }
        for name, law in laws.items():
            kinds[name] = partial(choose_as_in_a_step, law, output.logits, prompt, proposal)
        kinds["temperature, inverse CDF"] = lambda: inverse_cdf(output.logits, draws, temperature)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, run in kinds.items():
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
    finally:
        session.close()
    whole = median(seconds["pass"]) + median(seconds["draft"])
    return [
        {
            "request": name,
            "rows": ROWS,
            "ms": round(1e3 * median(times), 3),
            "share_of_step": round(median(times) / whole, 4),
        }
        for name, times in seconds.items()
    ]


def choose_as_in_a_step(
    law: Law, logits: torch.Tensor, prompt: Sequence[int], proposal: Proposal
) -> torch.Tensor:
    """Chooses with the noise that a step finds: all of it but that of the two newest positions, at τ about 2."""
    last = len(prompt) + ROWS - 1
    law._noise.pop(last, None)
    law._noise.pop(last - 1, None)
    return law.choose(logits, prompt, proposal)


def coupling(llm: LLM, completion: Completion, temperature: float, num_keys: int) -> list[dict[str, float]]:
    """Returns, for every anchor of a text, the chance that the first draft is right under each way of drafting."""
    drafter = llm.drafter
    assert isinstance(drafter, DFlash) and llm.checkpoint is not None
    ids, target = [*completion.prompt_ids, *completion.token_ids], llm.target
    target.tap(drafter.target_layer_ids)
    session, context = target.open(len(ids)), drafter.open(len(ids))
    (output,) = target.verify([VerifyRows(session, ids[:1], Proposal.chain(ids[1:-1]))])
    session.close()
    vocab = llm.checkpoint.token_ids
    columns = torch.arange(target.spec.vocab_size) if vocab is None else vocab.long()
    rows = []
    first = len(completion.prompt_ids)
    drafter.inject([context], [output.hidden[:first]], [ids[:first]])
    for position in range(first, len(ids) - 1):  # the anchor's own row is not yet injected
        own = (output.logits[position].double() / temperature).softmax(dim=-1)
        drafted = drafter.draft_logits([ids[position]], [context], 1)[0, 0].double() / temperature
        guess = torch.zeros_like(own).index_copy(0, columns, drafted.softmax(dim=-1))
        rows.append(
            {
                "likeliest": float(own[guess.argmax()]),
                "inverse_cdf": overlap(own, guess),
                "gumbel": gumbel_agreement(own, guess, position, num_keys),
                "bound": float(torch.minimum(own, guess).sum()),
            }
        )
        drafter.inject([context], [output.hidden[position : position + 1]], [ids[position : position + 1]])
    return rows


def overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns how much of the unit interval both inverse CDFs map to the same token."""
    upper = torch.minimum(one.cumsum(0), other.cumsum(0))
    lower = torch.maximum(one.cumsum(0) - one, other.cumsum(0) - other)
    return float((upper - lower).clamp(min=0).sum())


def gumbel_agreement(one: torch.Tensor, other: torch.Tensor, position: int, num_keys: int) -> float:
    """Returns the share of keys with which both distributions draw the same token."""
    same = 0
    for key in range(num_keys):
        noise = gumbel_row(key, 0, position, len(one))
        same += int((one.log() + noise).argmax()) == int((other.log() + noise).argmax())
    return same / num_keys


def decode(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> list[Completion]:
    """Returns the texts of prompts, decoded together, the seed being the number of the prompt."""
    engine = llm.new_engine(max_sequences=len(prompts), **options)
    for i, ids in enumerate(prompts):
        values = {name: getattr(params, name) for name in ("max_new_tokens", "temperature")}
        engine.add(Request(str(i), tuple(ids), SamplingParams(**values, seed=i)))
    while engine.has_work:
        engine.step()
    return [engine.take_completion(str(i)) for i in range(len(prompts))]


def compare(llm: LLM, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns coupling and τ by set of prompts."""
    assert llm.drafter is not None
    nodes = 5
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature)
    arms: dict[tuple[str, bool], dict[str, Any]] = {
        (f"chain of {llm.drafter.block_size - 1}", False): {"tree_nodes": None, "keyed_drafts": False},
        (f"chain of {llm.drafter.block_size - 1}", True): {"tree_nodes": None, "keyed_drafts": True},
        (f"tree of {nodes}", False): {"tree_nodes": nodes, "keyed_drafts": False},
        (f"tree of {nodes}", True): {"tree_nodes": nodes, "keyed_drafts": True},
    }
    couplings, lengths = [], []
    pooled: dict[tuple[str, bool], list[Any]] = {arm: [] for arm in arms}
    for name in SETS:
        prompts = [llm.render(p) for p in load_prompts(arguments.data, name, arguments.num_prompts)]
        plain = decode(llm, prompts, params, plain=True)
        rows = [r for c in plain[: arguments.num_coupled] for r in coupling(llm, c, params.temperature, 16)]
        means = {key: round(sum(r[key] for r in rows) / len(rows), 4) for key in rows[0]}
        couplings.append({"set": name, "num_anchors": len(rows), **means})
        print(json.dumps(couplings[-1]), flush=True)
        for (drafts, keyed), options in arms.items():
            done = decode(llm, prompts, params, **options)
            steps = [step for c in done for step in c.steps]
            pooled[drafts, keyed] += steps
            lengths.append(
                {
                    "set": name,
                    "drafts": drafts,
                    "keyed": keyed,
                    "num_prompts": len(done),
                    "num_identical": sum(
                        a.token_ids == b.token_ids for a, b in zip(plain, done, strict=True)
                    ),
                    "acceptance_length": round(acceptance_length(steps) or 0.0, 4),
                }
            )
            print(json.dumps(lengths[-1]), flush=True)
    for (drafts, keyed), steps in pooled.items():
        length = round(acceptance_length(steps) or 0.0, 4)
        lengths.append({"set": "all", "drafts": drafts, "keyed": keyed, "acceptance_length": length})
    return couplings, lengths


def main() -> None:
    """Runs the benchmark and stores its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument(
        "--num-coupled", type=int, default=3, help="texts a set along which coupling is measured"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sampling.json"))
    arguments = parser.parse_args()
    llm = LLM(dtype=arguments.dtype)
    (prompt,) = load_prompts(arguments.data, SETS[0], 1)
    rows = costs(llm, llm.render(prompt), arguments.temperature, arguments.repeats)
    for row in rows:
        print(json.dumps(row), flush=True)
    couplings, lengths = compare(llm, arguments)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "cost": rows,
        "coupling": couplings,
        "acceptance": lengths,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
