"""Prompts are read beside running texts, in bounded pieces, and change no bit of anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import Completion, Request
from paceline.drafter.base import Drafter
from paceline.drafter.combined import Combined
from paceline.drafter.lookup import PromptLookup
from paceline.engine import step as engine_step
from paceline.engine.engine import Engine
from paceline.engine.step import PREFILL_ROWS, PREFILL_ROWS_BESIDE
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeSession, NativeTarget
from paceline.testing import OracleDrafter, RandomDrafter, plain_texts, run_checked, tiny_drafter, tiny_target
from paceline.testing.tiny import tiny_eagle3
from watching import Counting, all_slots_are_free, request, tokens

Passes = list[list[tuple[int, bool]]]
"""By pass and part: its rows, and whether it is a piece of a prompt."""


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(max_positions=1200)


@pytest.fixture
def passes(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """What the target's passes are made of."""
    return watch(target, monkeypatch)


def watch(target: NativeTarget, patch: pytest.MonkeyPatch) -> Passes:
    seen, verify = Passes(), target.verify

    def note(batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        seen.append([(part.num_rows, part.last_row_only) for part in batch])
        return verify(batch)

    patch.setattr(target, "verify", note)
    return seen


def num_prompt_rows(parts: list[tuple[int, bool]]) -> int:
    return sum(rows for rows, is_prompt in parts if is_prompt)


# Who runs when -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_starves_nobody(target: NativeTarget, passes: Passes) -> None:
    engine = Engine(target, tiny_drafter(target, 4))
    engine.add(request("short", tokens(5), 40))
    engine.step()
    engine.add(request("long", tokens(700, seed=1), 4))
    seen = []
    while engine.has_work:
        seen.append([(d.request_id, d.step is None) for d in engine.step()])
    assert all(("short", False) in step for step in seen[:11]), "a token in each step beside the prompt"
    assert ("long", True) in seen[10] and not any(("long", True) in step for step in seen[:10])
    assert [num_prompt_rows(parts) for parts in passes[1:12]] == [64] * 10 + [60]
    assert PREFILL_ROWS_BESIDE == 64


def test_prompts_share_a_pass(target: NativeTarget, passes: Passes) -> None:
    """First come, first served, and each step is one pass."""
    engine = Engine(target)
    for i, length in enumerate([500, 20, 3, 600]):
        engine.add(request(str(i), tokens(length, seed=i), 3))
    said = []
    for number in range(3):
        said.append([delta.request_id for delta in engine.step() if delta.step is None])
        assert len(passes) == number + 1
    assert passes[0] == [(500, True), (12, True)] and PREFILL_ROWS == 512
    assert passes[1] == [(1, False), (8, True), (3, True), (53, True)]
    assert passes[2] == [(1, False)] * 3 + [(64, True)]
    assert said == [["0"], ["1", "2"], []]
    engine.close()


def test_a_target_says_how_long_a_piece_may_be(
    target: NativeTarget, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no bit hangs on where a prompt is cut, which hangs on who runs beside it."""
    monkeypatch.setattr(target, "_max_rows", 32)
    assert target.max_part_rows == 32
    engine = Engine(target)
    for i, length in enumerate([70, 20]):
        engine.add(request(str(i), tokens(length, seed=i), 2))
    engine.step()
    assert passes[0] == [(32, True), (20, True)]
    while engine.has_work:
        engine.step()
    assert max(rows for parts in passes for rows, _ in parts) == 32


def test_the_first_token_closes_the_prompt_in_its_own_step(target: NativeTarget) -> None:
    engine = Engine(target, OracleDrafter(4, []), max_sequences=2)
    engine.add(request("a", tokens(600), 2))
    assert engine.step() == []
    (sequence,) = engine.scheduler.running
    assert sequence.is_prefilling and sequence.session.length == 512
    sequence.check()
    (delta,) = engine.step()
    assert delta.step is None and len(delta.token_ids) == 1 and delta.num_drafted_tokens == 0
    assert not sequence.is_prefilling and sequence.session.length == 600
    (delta,) = engine.step()
    assert delta.step is not None and delta.step.num_sequences == 1
    completion = engine.take_completion("a")
    assert completion.prefill_s > 0 and completion.decode_s > 0 and completion.num_reused_tokens == 0


def test_a_record_counts_those_that_drafted(target: NativeTarget) -> None:
    engine = Engine(target)
    engine.add(request("a", tokens(5), 6))
    engine.step()
    engine.add(request("b", tokens(100), 6))
    completions = [engine.step() for _ in range(4)]
    sizes = [[d.step.num_sequences for d in deltas if d.step] for deltas in completions]
    assert sizes == [[1], [1], [2, 2], [2, 2]]
    engine.close()


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parked", [0, 4096])
def test_a_prompt_may_be_cancelled_on_its_way(parked: int, target: NativeTarget) -> None:
    made = [request("a", tokens(5), 20), request("b", tokens(900, seed=1), 20)]
    (plain,) = plain_texts(target, made[:1])
    engine = Engine(target, tiny_drafter(target, 4), prefix_tokens=parked)
    for one in made:
        engine.add(one)
    engine.step()
    engine.step()
    (long,) = [s for s in engine.scheduler.running if s.is_prefilling]
    assert long.session.length == 512 - 5 + 64
    assert engine.cancel("b") and not engine.cancel("b")
    assert not engine.prefixes.parked, "half a prompt is not kept"
    assert engine.take_completion("b").token_ids == ()
    while engine.has_work:
        engine.step()
    assert engine.take_completion("a").token_ids == plain.token_ids
    engine.close()
    assert all_slots_are_free(target)


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_a_pass_that_raised_loses_nobody(
    when: int, target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [request("a", tokens(5), 12), request("b", tokens(200, seed=1), 5)]
    plain = plain_texts(target, made)
    Counting(target, monkeypatch, raising=[when])
    engine, num_raised = Engine(target, tiny_drafter(target, 4)), 0
    for one in made:
        engine.add(one)
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            num_raised += 1
        for sequence in engine.scheduler.running:
            sequence.check()
    assert num_raised == 1
    assert [engine.take_completion(c.request_id).token_ids for c in plain] == [c.token_ids for c in plain]


def test_there_may_be_no_memory_for_one_of_many(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [request(str(i), tokens(90, seed=i), 8) for i in range(4)]
    plain = plain_texts(target, made)
    opened = target.open

    def scarce(capacity: int) -> NativeSession:
        if len(engine.scheduler.running) == 2 and not any(
            s.request.id == "3" for s in engine.scheduler.running
        ):
            monkeypatch.setattr(target, "open", opened)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\n(no more)")
        return opened(capacity)

    engine = Engine(target, tiny_drafter(target, 4))
    monkeypatch.setattr(target, "open", scarce)
    completions = run_checked(engine, made)
    assert completions["2"].finish_reason == "error"
    assert completions["2"].stop_reason == (
        "no memory for a text of 101 tokens (DefaultCPUAllocator: can't allocate memory); "
        "hint: fewer texts at once"
    )
    assert [completions[i].token_ids for i in "013"] == [plain[int(i)].token_ids for i in "013"]
    assert all_slots_are_free(target)


def test_slots_that_could_not_grow_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    target.open(20).close()
    blank = target._blank

    def fail(shape: tuple[int, ...]) -> torch.Tensor:
        raise MemoryError("no more")

    monkeypatch.setattr(target, "_blank", fail)
    with pytest.raises(MemoryError):
        target.open(100)
    monkeypatch.setattr(target, "_blank", blank)
    made = request("a", tokens(90), 20)
    assert len(run_checked(Engine(target), [made])["a"].token_ids) == 20


# Bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pieces_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden rows of prompts and texts, however the prompts were cut and whoever ran beside."""
    target = tiny_target(max_positions=700, dtype=dtype, hidden_size=64)
    made = [request(str(i), tokens(n, seed=i), 10) for i, n in enumerate([600, 3, 90, 330])]
    alone, together = OracleDrafter(1, [], (0, 1)), OracleDrafter(2, [], (0, 1))
    for one in made:
        run_checked(Engine(target, replace_block(alone), max_sequences=1), [one])
    for alone_rows, beside in ((512, 64), (100, 7), (33, 1)):
        monkeypatch.setattr(engine_step, "PREFILL_ROWS", alone_rows)
        monkeypatch.setattr(engine_step, "PREFILL_ROWS_BESIDE", beside)
        together.memories.clear()
        run_checked(Engine(target, together), made)
        for expected, got in zip(alone.memories, together.memories, strict=True):
            assert torch.equal(expected.hidden, got.hidden)


def replace_block(drafter: OracleDrafter) -> OracleDrafter:
    drafter.block_size = 2  # a drafter that has nothing to say decodes plainly, and is shown all rows
    return drafter


# All of it -----------------------------------------------------------------------------------------------------------

TARGET = tiny_target(max_positions=512)
SYSTEM, OTHER = tokens(48, seed=100), tokens(70, seed=101)
PROMPTS = [
    *(SYSTEM + tokens(n, seed=n) for n in (1, 4, 60, 130)),
    *(OTHER + tokens(n, seed=n) for n in (3, 90)),
    SYSTEM,
    tokens(1, seed=7),
    tokens(9, seed=8),
    tokens(160, seed=9),
]
HEATS = (0.0, 1.3)
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "dflash": tiny_drafter(TARGET, 5, layer_types=("full_attention", "sliding_attention"), sliding_window=20),
    "dflash2": tiny_drafter(TARGET, 4, variant="dflash2"),
    "eagle3": tiny_eagle3(TARGET, 4),
    "combined": Combined(PromptLookup(6, 3, 1), tiny_drafter(TARGET, 4)),
    "not to be copied": RandomDrafter(4, TARGET.spec.vocab_size, seed=1),
}


@cache
def plainly(prompt: tuple[int, ...], max_new_tokens: int, heat: float) -> Completion:
    (completion,) = plain_texts(TARGET, [request("a", prompt, max_new_tokens, temperature=heat, seed=3)])
    return completion


def arrivals() -> st.SearchStrategy[list[tuple[int, Request]]]:
    """Requests and the steps before which they arrive, in that order."""
    one = st.tuples(
        st.integers(0, 12), st.sampled_from(PROMPTS), st.sampled_from([1, 2, 9]), st.sampled_from(HEATS)
    )

    def named(drawn: list[Any]) -> list[tuple[int, Request]]:
        return [
            (when, request(str(i), prompt, most, temperature=heat, seed=3))
            for i, (when, prompt, most, heat) in enumerate(sorted(drawn, key=lambda each: int(each[0])))
        ]

    return st.lists(one, min_size=1, max_size=7).map(named)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@settings(deadline=None, max_examples=40)
@given(
    drafter=st.sampled_from(sorted(DRAFTERS)),
    asked=arrivals(),
    cancels=st.dictionaries(st.integers(0, 15), st.integers(0, 6), max_size=3),
    max_sequences=st.integers(1, 4),
    rows=st.tuples(st.integers(1, 200), st.integers(1, 80)),
    prefix_tokens=st.sampled_from([0, 400, 2000]),
)
def test_whoever_comes_and_goes_each_text_is_the_one_it_is_alone(
    drafter: str,
    asked: list[tuple[int, Request]],
    cancels: dict[int, int],
    max_sequences: int,
    rows: tuple[int, int],
    prefix_tokens: int,
    patch: pytest.MonkeyPatch,
) -> None:
    with patch.context() as local:
        local.setattr(engine_step, "PREFILL_ROWS", rows[0])
        local.setattr(engine_step, "PREFILL_ROWS_BESIDE", rows[1])
        passes = watch(TARGET, local)
        engine = Engine(TARGET, DRAFTERS[drafter], max_sequences=max_sequences, prefix_tokens=prefix_tokens)
        waiting, delivered, number = list(asked), dict[str, tuple[int, ...]](), 0
        while waiting or engine.has_work:
            while waiting and waiting[0][0] <= number:
                engine.add(waiting.pop(0)[1])
            engine.cancel(str(cancels.get(number, -1)))
            running = {s.request.id for s in engine.scheduler.running if not s.is_prefilling}
            before = len(passes)
            deltas = engine.step()
            assert running <= {delta.request_id for delta in deltas}, "nobody who runs waits"
            for parts in passes[before:]:
                assert num_prompt_rows(parts) <= rows[1 if running else 0]
            assert len(passes) - before == bool(engine.scheduler.running or deltas)
            for delta in deltas:
                delivered[delta.request_id] = delivered.get(delta.request_id, ()) + delta.token_ids
            for sequence in engine.scheduler.running:
                sequence.check()
            assert engine.prefixes.num_tokens <= prefix_tokens
            number += 1
        engine.close()
    assert all_slots_are_free(TARGET)
    for _, one in asked:
        params, completion = one.params, engine.take_completion(one.id)
        expected = plainly(one.prompt_ids, params.max_new_tokens, params.temperature)
        assert delivered.get(one.id, ()) == completion.token_ids
        if completion.finish_reason == "cancelled":
            assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason) == (expected.token_ids, "length")
