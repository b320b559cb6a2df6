"""The same text with drafts and without: random requests on the real pair, tiny pairs, and structured output.

    python benchmarks/exactness.py [--data DIR] [--num-requests 200] [--max-new-tokens 16]
    python benchmarks/exactness.py --dtype bfloat16 --num-requests 12 --max-new-tokens 12 --only random

Requests are drawn from a seed: temperatures from 0 to 1.5, every filter, penalties, biases, bad words, stops, grammars,
log-probabilities. Each is decoded plainly and alone, then drafted with chains of block size 4, 8 and 16 in batches of 1
and 8, and with trees of 2 and 5 nodes in batches of 8. Block size 16 is the shipped drafter with more slots than it was
trained on: worse guesses, the same law. Parts: `random` (real pair), `tiny` (float64, no exception allowed), `json`
(JSON schemas: valid, and identical to plain constrained decoding), `directed` (the score test of `paceline verify` on
many tokens).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decode import SETS, load_prompts
from paceline.bench.exactness.checks import judge
from paceline.bench.exactness.losslessness import draw, law_checks
from paceline.bench.exactness.texts import Pair, sampled_requests
from paceline.bench.workloads.prompts import Prompt
from paceline.core.acceptance import acceptance_length
from paceline.core.params import Grammar, SamplingParams
from paceline.core.types import Completion, Request
from paceline.drafter.base import Drafter, NeuralDrafter
from paceline.engine.engine import Engine
from paceline.engine.runtime import machine, probe_rows
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM
from paceline.testing import BigramDrafter, tiny_drafter, tiny_target

GRAMMARS = (
    Grammar("regex", r"(yes|no|maybe), because [a-z ]{5,40}\."),
    Grammar("regex", r"[0-9]{1,3}(, [0-9]{1,3}){1,5}"),
    Grammar("lark", 'start: "- " ITEM ("\\n- " ITEM){1,3}\nITEM: /[A-Za-z ]{3,20}/'),
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"],
            "additionalProperties": False,
        }
    ),
)
MAX_PROMPT_TOKENS = 128
STOPS = ("\n\n", ". ", "the end", ", and")


@dataclass(frozen=True)
class Arm:
    """One way of drafting: its name, its drafter, texts at once."""

    name: str
    drafter: Drafter | None
    batch: int


def random_params(
    rng: random.Random, vocab_size: int, max_new_tokens: int, *, grammars: bool
) -> SamplingParams:
    """Returns options drawn from `rng`: each is on in a fraction of requests, so that they meet in many ways."""

    def sometimes(share: float, value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if rng.random() < share else otherwise

    some_ids = [rng.randrange(vocab_size) for _ in range(12)]
    grammar = sometimes(0.2, lambda: rng.choice(GRAMMARS), None) if grammars else None
    free = grammar is None
    low = sometimes(0.3, lambda: rng.randrange(1, 8), 0) if free else 0
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=sometimes(0.8, lambda: rng.uniform(0.05, 1.5), 0.0),
        top_k=sometimes(0.3, lambda: rng.choice((1, 5, 40, 200)), 0),
        top_p=sometimes(0.4, lambda: rng.uniform(0.3, 0.99), 1.0),
        min_p=sometimes(0.3, lambda: rng.uniform(0.01, 0.3), 0.0),
        repetition_penalty=sometimes(0.3, lambda: rng.uniform(0.8, 1.5), 1.0),
        presence_penalty=sometimes(0.2, lambda: rng.uniform(-1, 2), 0.0),
        frequency_penalty=sometimes(0.2, lambda: rng.uniform(-0.5, 1.5), 0.0),
        logit_bias=sometimes(0.2, lambda: {t: rng.uniform(-5, 5) for t in some_ids}, ()),
        bad_words=sometimes(0.2, lambda: ((some_ids[0],), tuple(some_ids[1:3])), ()) if free else (),
        allowed_token_ids=sometimes(0.1, lambda: tuple(range(0, vocab_size, 3)), None) if free else None,
        stop_token_ids=sometimes(0.2, lambda: tuple(some_ids[3:6]), ()),
        stop=sometimes(0.2, lambda: tuple(rng.sample(STOPS, 2)), ()) if grammars else (),
        min_new_tokens=low,
        ignore_eos=sometimes(0.2, lambda: True, False) if free else False,
        grammar=grammar,
        seed=rng.randrange(2**63),
        logprobs=sometimes(0.2, lambda: rng.randrange(6), None),
    )


def run(
    arm: Arm, requests: Sequence[Request], engine: Callable[[Arm], Engine]
) -> tuple[dict[str, Completion], float]:
    """Returns the completions of an arm by request id, and its seconds."""
    started, decoding, done = time.perf_counter(), engine(arm), {}
    for request in requests:
        decoding.add(request)
    while decoding.has_work:
        for delta in decoding.step():
            if delta.finish_reason is not None:
                done[delta.request_id] = decoding.take_completion(delta.request_id)
    return done, time.perf_counter() - started


def compare(
    arms: Sequence[Arm], requests: Sequence[Request], engine: Callable[[Arm], Engine]
) -> tuple[list[dict[str, Any]], dict[str, Completion]]:
    """Returns a row for each arm, the first being the one that others are compared with, and its completions."""
    expected, seconds = run(arms[0], requests, engine)
    rows = [_row(arms[0], expected, expected, seconds)]
    for arm in arms[1:]:
        got, seconds = run(arm, requests, engine)
        rows.append(_row(arm, got, expected, seconds))
        print(json.dumps(rows[-1]), flush=True)
    return rows, expected


def _row(
    arm: Arm, got: dict[str, Completion], expected: dict[str, Completion], seconds: float
) -> dict[str, Any]:
    different = [name for name in expected if _said(got[name]) != _said(expected[name])]
    same = [name for name in expected if name not in different]
    steps = [step for c in got.values() for step in c.steps]
    length = acceptance_length(steps) if arm.drafter is not None else None
    return {
        "drafts": arm.name,
        "batch": arm.batch,
        "num_requests": len(expected),
        "num_identical": len(expected) - len(different),
        "different": different,
        "largest_logprob_difference": max((_logprob_gap(got[n], expected[n]) for n in same), default=0.0),
        "num_tokens": sum(len(c.token_ids) for c in got.values()),
        "acceptance_length": round(length, 4) if length else None,
        "seconds": round(seconds, 1),
    }


def _logprob_gap(one: Completion, other: Completion) -> float:
    """Returns the largest difference between the log-probabilities of two equal texts, 0 where none were asked for."""
    pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
    return max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0)


def _said(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


# The real pair -------------------------------------------------------------------------------------------------------


def widened(llm: LLM, block_size: int) -> NeuralDrafter:
    """Returns the shipped drafter with more slots than it was trained on."""
    assert llm.checkpoint is not None
    config = replace(llm.checkpoint.config, block_size=block_size)
    drafter = replace(llm.checkpoint, config=config).build(llm.dtype, llm.device)
    return drafter.bind(llm.target.heads, llm.checkpoint.token_ids)


def real_engine(llm: LLM) -> Callable[[Arm], Engine]:
    """Returns what makes an engine of an arm, with text and grammars."""

    def engine(arm: Arm) -> Engine:
        model = llm.new_engine(plain=True)
        return Engine(
            llm.target,
            arm.drafter,
            max_sequences=arm.batch,
            new_decoder=model._new_decoder,
            open_grammar=model._open_grammar,
        )

    return engine


def real_arms(llm: LLM) -> list[Arm]:
    """Returns plain decoding alone, then every way of drafting, alone and eight at once."""
    wide = widened(llm, 16)
    drafters: list[tuple[str, Drafter | None]] = [("plain", None)]
    drafters += [(f"block of {size}", Limited(wide, size)) for size in (4, 8, 16)]
    trees = [Arm(f"tree of {nodes}", TreeDrafter(wide, nodes), 8) for nodes in (2, 5)]
    return [Arm(name, drafter, batch) for batch in (1, 8) for name, drafter in drafters] + trees


class Limited:
    """A drafter with fewer slots than it has."""

    def __init__(self, drafter: NeuralDrafter, block_size: int) -> None:
        self._drafter, self.block_size = drafter, block_size
        self.target_layer_ids = drafter.target_layer_ids
        self.open, self.inject, self.draft = drafter.open, drafter.inject, drafter.draft


def random_part(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns how many random requests keep their text, by arm."""
    rng, count = random.Random(arguments.seed), arguments.num_requests
    texts = [p for name in SETS for p in load_prompts(arguments.data, name, 2 * count // len(SETS))]
    prompts = [ids for ids in map(llm.render, texts) if len(ids) <= MAX_PROMPT_TOKENS]
    rng.shuffle(prompts)
    requests = [
        Request(
            f"r{i}",
            tuple(prompt),
            random_params(rng, llm.target.spec.vocab_size, arguments.max_new_tokens, grammars=True),
        )
        for i, prompt in enumerate(prompts[:count])
    ]
    rows, _ = compare(real_arms(llm), requests, real_engine(llm))
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "row_invariance": probe_rows(llm.target).verdict,
        "rows": rows,
    }


def json_part(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns validity, identity and τ of 50 requests for JSON, with schemas of ten shapes."""
    shapes = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
    cases = [
        {"prompt": shape["prompt"].format(subject), "schema": shape["schema"]}
        for shape in shapes
        for subject in shape["subjects"]
    ]
    requests = [
        Request(
            f"j{i}",
            tuple(llm.render(f"{case['prompt']} Answer with JSON only.")),
            SamplingParams(
                max_new_tokens=192,
                temperature=(0.0, 0.7)[i % 2],
                seed=i,
                grammar=Grammar.json_schema(case["schema"]),
            ),
        )
        for i, case in enumerate(cases)
    ]
    arms = [a for a in real_arms(llm) if a.name == "plain" or a.name.startswith(("block of 8", "tree"))]
    rows, plain = compare([a for a in arms if a.batch == 8], requests, real_engine(llm))
    valid = sum(is_valid(plain[f"j{i}"], case["schema"]) for i, case in enumerate(cases))
    return {"num_requests": len(requests), "num_valid": valid, "rows": rows}


def is_valid(completion: Completion, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON and satisfies the schema, by the jsonschema package."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(completion.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


# Tiny pairs ----------------------------------------------------------------------------------------------------------


def tiny_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns how many random requests keep their text on a tiny pair in float64: all must."""
    rng, target = random.Random(arguments.seed), tiny_target()
    requests = [
        Request(
            f"t{i}",
            tuple(rng.randrange(61) for _ in range(rng.randrange(1, 40))),
            random_params(rng, 61, 40, grammars=False),
        )
        for i in range(2 * arguments.num_requests)
    ]
    arms = [Arm("plain", None, 1)]
    for block in (4, 8, 16):
        drafter = tiny_drafter(target, block)
        arms += [Arm(f"block of {block}", drafter, batch) for batch in (1, 8)]
        arms.append(Arm(f"tree of {block}", TreeDrafter(drafter, block), 8))
    rows, _ = compare(arms, requests, lambda arm: Engine(target, arm.drafter, max_sequences=arm.batch))
    return {"dtype": "float64", "rows": rows}


class TinyPair:
    """A tiny target with a drafter that guesses well, as the checks of `paceline verify` want a pair."""

    def __init__(self) -> None:
        self.target = tiny_target(max_positions=256)
        self.drafter = BigramDrafter(self.target)

    def new_engine(
        self, *, plain: bool = False, max_sequences: int | None = None, keyed_drafts: bool = True, **_: Any
    ) -> Engine:
        """Returns an engine over the pair."""
        drafter = None if plain else self.drafter
        return Engine(self.target, drafter, max_sequences=max_sequences or 8, keyed_drafts=keyed_drafts)


# The directed score --------------------------------------------------------------------------------------------------


def directed_part(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the tests of the law on many tokens of the tiny and of the real pair."""
    tiny = [Prompt(f"t{i}", (3 + i % 50, 3 + i // 50, 5), "") for i in range(512)]
    texts = [(n, p) for n in SETS for p in load_prompts(arguments.data, n, 24)]
    real = [Prompt(f"{n}{i}", tuple(llm.render(p)), p) for i, (n, p) in enumerate(texts)]
    return {
        "tiny": law_part(TinyPair(), tiny, SamplingParams(220, 1.0, ignore_eos=True), 128),
        "real": law_part(llm, real, SamplingParams(64, 1.0, seed=1, ignore_eos=True), 8),
    }


def law_part(pair: Pair, prompts: list[Prompt], params: SamplingParams, batch: int) -> dict[str, Any]:
    """Returns the checks of `paceline verify` that need no plain text, as it reports them."""
    alpha = 0.01
    draws = draw(pair, sampled_requests(prompts, params), batch, lambda *_: None)
    checks = judge(law_checks(draws, alpha), alpha)
    for check in checks:
        print(check.name, check.status, check.summary, flush=True)
    return {
        "num_tokens": draws.moments.num_positions + draws.num_impossible,
        "checks": [check.to_dict() for check in checks],
    }


def main() -> None:
    """Runs the parts asked for and stores the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("random", "tiny", "json", "directed"), nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    llm = LLM(dtype=arguments.dtype)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "random": lambda: random_part(llm, arguments),
        "tiny": lambda: tiny_part(arguments),
        "json": lambda: json_part(llm, arguments),
        "directed": lambda: directed_part(llm, arguments),
    }
    out = arguments.out or Path(f"benchmarks/results/exactness_{arguments.dtype}.json")
    for name in arguments.only or parts:
        with torch.inference_mode():
            done = parts[name]()
        command = " ".join(["python", *sys.argv])
        store(out, arguments.dtype, name, {"command": command, "date": time.strftime("%Y-%m-%d"), **done})


def store(path: Path, dtype: str, name: str, part: dict[str, Any]) -> None:
    """Writes one part into the result; parts of other runs on the same machine stay."""
    where = {"environment": machine(), "dtype": dtype}
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = before if all(before.get(key) == value for key, value in where.items()) else {}
    path.write_text(json.dumps({**where, **kept, name: part}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
