"""The default pair end to end: the target that people get, the drafter that ships for it, and who else runs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from paceline.cli.demo import load_demo_prompts
from paceline.core.acceptance import acceptance_length
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.engine.runtime import probe_rows
from paceline.llm import LLM, shipped_drafter

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_new_tokens=40)


@cache
def pair(dtype: str) -> LLM:
    """The default pair in one dtype."""
    return LLM(dtype=dtype)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Kernels may split work by thread, so the number is fixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Returns demo prompts as token ids."""
    return [llm.render(prompt.prompt) for prompt in load_demo_prompts(None)[:count]]


def decode(engine: Engine, ids: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Returns the completions of prompts in order, checking the invariant after every step."""
    for i, prompt in enumerate(ids):
        engine.add(Request(str(i), tuple(prompt), params))
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            sequence.check()
    return [engine.take_completion(str(i)) for i in range(len(ids))]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    """Returns the token ids of each completion."""
    return [completion.token_ids for completion in completions]


def test_a_drafter_ships_for_the_default_target() -> None:
    checkpoint = pair("float32").checkpoint
    assert checkpoint is not None and checkpoint.provenance["num_blocks"] > 0
    folder = shipped_drafter("smollm2-135m-instruct")
    assert folder is not None and sum(file.stat().st_size for file in folder.iterdir()) < 40e6


def test_dflash_is_lossless_and_guesses_well_in_float32() -> None:
    llm = pair("float32")
    ids = prompts(llm, 5)
    plain = decode(llm.new_engine(plain=True, max_sequences=1), ids, GREEDY)
    chain = decode(llm.new_engine(tree_nodes=None, max_sequences=1), ids, GREEDY)
    batch = decode(llm.new_engine(tree_nodes=None, max_sequences=3), ids, GREEDY)
    tree = decode(llm.new_engine(tree_nodes=9, max_sequences=2), ids, GREEDY)
    assert tokens(plain) == tokens(chain) == tokens(batch) == tokens(tree)
    tau = [acceptance_length([s for c in run for s in c.steps]) or 0.0 for run in (plain, chain, batch, tree)]
    assert tau[0] == 1.0 and 1.3 < tau[1] == tau[2] < tau[3]


def test_a_seed_gives_one_text_with_and_without_drafts() -> None:
    llm = pair("float32")
    params = SamplingParams(max_new_tokens=32, temperature=0.8, seed=11)
    texts = [
        tokens(decode(llm.new_engine(plain=plain, max_sequences=n), prompts(llm, 3), params))
        for plain, n in ((True, 1), (False, 1), (False, 3))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_dflash_is_lossless_in_bfloat16() -> None:
    llm = pair("bfloat16")
    ids, params = prompts(llm, 2), SamplingParams(max_new_tokens=24)
    plain = decode(llm.new_engine(plain=True, max_sequences=1), ids, params)
    assert tokens(plain) == tokens(decode(llm.new_engine(max_sequences=1), ids, params))


def test_float32_rows_do_not_depend_on_their_neighbours() -> None:
    assert probe_rows(pair("float32").target).is_exact


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # z-lab passes it by that name
def test_others_say_the_same_with_the_same_weights() -> None:
    """transformers' greedy text, and z-lab's decoder with our drafter: token for token."""
    llm = pair("float32")
    folder = shipped_drafter("smollm2-135m-instruct")
    reference = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.float32).eval()
    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = prompts(llm, 2)
    own = decode(Engine(llm.target, llm.checkpoint.build(torch.float32).bind(llm.target.heads)), ids, GREEDY)  # type: ignore[union-attr]
    for prompt, completion in zip(ids, own, strict=True):
        row = torch.tensor([prompt])
        plain = reference.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert tuple(plain[0, len(prompt) :].tolist()) == completion.token_ids
        theirs = dflash_generate(
            model,
            target=reference,
            input_ids=row,
            max_new_tokens=40,
            stop_token_ids=list(llm.target.spec.eos_token_ids),
            temperature=0.0,
        )
        assert tuple(theirs[0, len(prompt) :].tolist()) == completion.token_ids
