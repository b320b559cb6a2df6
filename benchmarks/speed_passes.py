"""Parts `plain` and `rows` of `speed.py`: plain decoding against the memory's speed, and what wider passes cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from paceline.bench.arms.copying import copy_rates
from paceline.bench.arms.oracles import Transformers, load_target
from paceline.bench.numbers.summary import Interval
from paceline.core.params import SamplingParams
from paceline.core.tree import grow
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.drafter.dflash import DFlash
from paceline.llm import LLM
from paceline.target.base import VerifyRows
from paceline.target.weights import Shape, read_tensors
from speed_engines import of_trace
from speed_results import Row
from speed_timing import Timed, decode, pooled, turn

PROBE_BYTES = 256 * 2**20
"""Far beyond any cache."""
NUM_ROWS = (2, 3, 4, 8, 16, 32)
CONTEXT = 256
CANDIDATES = 16


# Plain decoding against the memory -----------------------------------------------------------------------------------


def read_rate(numbers: torch.Tensor, tries: int = 3) -> float:
    """Returns bytes per second, read by a dot product of the halves of an array; the best try."""
    first, second = numbers.chunk(2)
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        torch.dot(first, second)
        seconds.append(time.perf_counter() - started)
    return 2 * first.nbytes / min(seconds)


def pass_bytes(llm: LLM) -> int:
    """Returns the bytes of weights that a pass reads once: all but an embedding that is not the head too."""
    shape = Shape.from_config(json.loads((llm.folder / "config.json").read_text(encoding="utf-8")))
    tensors = read_tensors(llm.folder)
    is_tied = shape.tie_word_embeddings and "lm_head.weight" not in tensors
    read = [t for name, t in tensors.items() if is_tied or name != "model.embed_tokens.weight"]
    return llm.dtype.itemsize * sum(tensor.numel() for tensor in read)


def floor_share(
    samples: Sequence[Sequence[float]], rates: Sequence[float], num_bytes: int
) -> Interval | None:
    """Returns the share of the bandwidth floor: seconds that reading the weights takes over seconds of a pass. Pure.

    Args:
        samples: of plain decoding alone, a token a pass.
        rates: bytes per second, measured beside each sample.
    """
    columns = np.array([[s[0], s[1] * r] for s, r in zip(samples, rates, strict=True)], dtype=np.float64)
    return pooled(lambda sums: num_bytes * sums[..., 0] / sums[..., 1], columns)


def measure_plain(llm: LLM, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> Row:
    """Returns plain decoding, transformers' `generate` and the memory's rates, prompt by prompt in turns."""
    numbers = torch.ones(PROBE_BYTES // 4)  # written: blank pages are all one page
    engine, oracle = llm.new_engine(plain=True, max_sequences=1), Transformers()
    oracle.open(llm, load_target(llm))
    params = SamplingParams(max_new_tokens)
    arms: dict[str, Callable[[tuple[int, ...]], Timed]] = {
        "plain": lambda prompt: decode(engine, [prompt], [params]),
        "transformers": lambda prompt: of_trace(lambda: oracle.decode(prompt, params)),
    }
    for run in arms.values():
        run(prompts[0])
    samples: dict[str, list[list[float]]] = {name: [] for name in arms}
    rates: dict[str, list[float]] = {"copy": [], "read": []}
    num_same = 0
    for i, prompt in enumerate(prompts):
        rates["copy"].append(round(max(copy_rates(llm.device))))
        rates["read"].append(round(read_rate(numbers)))
        done = {name: arms[name](prompt) for name in turn(list(arms), i)}
        num_same += done["plain"].texts == done["transformers"].texts
        for name, timed in done.items():
            samples[name].append(timed.sample)
    return {
        "weight_bytes": pass_bytes(llm),
        "bytes_per_s": rates,
        "versions": {"transformers": oracle.engine},
        "num_texts": len(prompts),
        "num_same": {"transformers": num_same},
        "samples": samples,
    }


# Wider passes --------------------------------------------------------------------------------------------------------


class Passes:
    """A context of real text, and passes of so many rows behind it.

    Args:
        llm: a pair whose drafter is of the DFlash kind, since its guesses shape the trees.
        ids: at least `CONTEXT` + 32 tokens.
    """

    def __init__(self, llm: LLM, ids: Sequence[int]) -> None:
        if not isinstance(llm.neural, DFlash):
            raise SystemExit(
                "rows: expected a DFlash drafter, whose guesses shape the trees; hint: --drafter auto"
            )
        self._target, self._drafter, self._ids = llm.target, llm.neural, list(ids)
        self._target.tap(self._drafter.target_layer_ids)  # as beside a drafter
        self._session = self._target.open(CONTEXT + 256)
        (output,) = self._target.verify(
            [VerifyRows(self._session, self._ids[:CONTEXT], EMPTY_PROPOSAL, last_row_only=True)]
        )
        self._session.keep(range(CONTEXT))
        context = self._drafter.open(CONTEXT + 256)
        self._drafter.inject([context], [output.hidden], [self._ids[:CONTEXT]])
        num_drafts = self._drafter.config.num_draft_tokens
        self._logits_KV = self._drafter.draft_logits([self._ids[CONTEXT]], [context], num_drafts)[0]

    def plain(self) -> float:
        """Returns the seconds of a pass of one row."""
        return self._run(lambda: EMPTY_PROPOSAL, lambda _: (0,))

    def chain(self, num_rows: int) -> float:
        """Returns the seconds of a chain, two of whose drafts are kept."""
        drafts = Proposal.chain(self._ids[CONTEXT + 1 : CONTEXT + num_rows])
        return self._run(lambda: drafts, lambda _: tuple(range(min(3, num_rows))))

    def tree(self, num_rows: int) -> float:
        """Returns the seconds of a tree: built from the slots' logits, verified, its least likely path kept."""
        return self._run(lambda: self._grow(num_rows - 1), last_path)

    def _grow(self, num_nodes: int) -> Proposal:
        best, ids = self._logits_KV.log_softmax(dim=-1).topk(min(CANDIDATES, num_nodes), dim=-1)
        return grow(best.tolist(), ids.tolist(), num_nodes)

    def _run(self, propose: Callable[[], Proposal], path: Callable[[Proposal], Sequence[int]]) -> float:
        started = time.perf_counter()
        proposal = propose()
        self._target.verify([VerifyRows(self._session, [self._ids[CONTEXT]], proposal)])
        self._session.keep(path(proposal))
        return time.perf_counter() - started

    def close(self) -> None:
        """Gives the K/V back."""
        self._session.close()


def last_path(proposal: Proposal) -> tuple[int, ...]:
    """Returns the rows from the anchor to the last node. Pure."""
    path = [len(proposal.tokens)]
    while path[-1]:
        path.append(proposal.parents[path[-1] - 1])
    return tuple(reversed(path))


def measure_rows(llm: LLM, prompts: Sequence[tuple[int, ...]], num_rounds: int) -> list[Row]:
    """Returns seconds of passes by kind and rows, round by round in turns, each beside the round's plain passes.

    Every round has a context of its own, and a plain pass before and after the others.
    """
    text = [token for prompt in prompts for token in prompt]
    needed = CONTEXT + max(NUM_ROWS) + 1
    text *= -(-needed // len(text))
    kinds = [(kind, n) for kind in ("chain", "tree") for n in NUM_ROWS]
    seconds: dict[tuple[str, int], list[float]] = {each: [] for each in kinds}
    plain_s: list[float] = []
    for number in range(-1, num_rounds):  # the first one warms up
        start = (number + 1) * 97 % (len(text) - needed + 1)
        passes = Passes(llm, text[start : start + needed])
        before = passes.plain()
        found = dict(_round(passes, turn(kinds, max(0, number))))
        after = passes.plain()
        passes.close()
        if number >= 0:
            plain_s.append(round((before + after) / 2, 6))
            for each, value in found.items():
                seconds[each].append(round(value, 6))
    return [
        {"kind": kind, "num_rows": n, "seconds": seconds[kind, n], "plain_s": plain_s} for kind, n in kinds
    ]


def _round(passes: Passes, kinds: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], float]]:
    for kind, num_rows in kinds:
        yield (kind, num_rows), passes.chain(num_rows) if kind == "chain" else passes.tree(num_rows)
