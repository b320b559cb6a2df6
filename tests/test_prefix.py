"""What was read once is not read again: copies are the same bits, what is kept is bounded, and nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CapacityError, ConfigError
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request
from paceline.drafter.base import Drafter, Forkable
from paceline.drafter.combined import Combined
from paceline.drafter.lookup import PromptLookup
from paceline.engine.engine import Engine
from paceline.engine.prefix import MIN_PREFIX, Held, PrefixCache
from paceline.engine.tree import TreeDrafter
from paceline.target.base import Target, TargetSession, VerifyRows
from paceline.target.hf import HFTarget
from paceline.target.native import NativeTarget
from paceline.testing import (
    RandomDrafter,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_shape,
    tiny_target,
    whole,
)
from paceline.testing.tiny import tiny_eagle3, tiny_tensors
from test_native_parity import transformers_model
from watching import Watched, all_slots_are_free, request, tokens

TARGET = tiny_target(max_positions=512)
DRAFTERS: dict[str, Drafter] = {
    "dflash": tiny_drafter(TARGET, 5),
    "sliding": tiny_drafter(
        TARGET, 5, layer_types=("sliding_attention", "full_attention"), sliding_window=20, is_causal=True
    ),
    "dflash2": tiny_drafter(TARGET, 5, variant="dflash2"),
    "trees": TreeDrafter(tiny_drafter(TARGET, 5), 6),
    "eagle3": tiny_eagle3(TARGET, 5),
    "lookup": PromptLookup(5, 3, 1),
    "combined": Combined(PromptLookup(5, 3, 2), tiny_drafter(TARGET, 5)),
}


def finish(engine: Engine, made: Sequence[Request]) -> list[Completion]:
    """Adds requests to an engine and decodes them to their ends; what is parked stays."""
    for one in made:
        engine.add(one)
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            sequence.check()
        assert engine.prefixes.num_tokens <= engine.prefixes.max_tokens
    return [engine.take_completion(one.id) for one in made]


def read(target: Target, text: Sequence[int], capacity: int = 300) -> tuple[Any, torch.Tensor]:
    """A session that holds the text, and its hidden rows."""
    session = target.open(capacity)
    (output,) = target.verify([VerifyRows(session, text, EMPTY_PROPOSAL, last_row_only=True)])
    session.keep(range(len(text)))
    return session, output.hidden


# Copies --------------------------------------------------------------------------------------------------------------


def targets() -> list[Target]:
    shape = tiny_shape(hidden_size=64, max_positions=512)
    model = transformers_model(shape).double()
    model.load_state_dict(tiny_tensors(shape))
    native = [tiny_target(max_positions=512, hidden_size=64, dtype=d) for d in (torch.float32, torch.float64)]
    return [*native, HFTarget(model, name="tiny")]


@pytest.mark.parametrize("target", targets(), ids=["float32", "float64", "transformers"])
@pytest.mark.parametrize("length", [32, 63, 150])
def test_a_copied_beginning_has_the_bits_of_one_that_was_read(length: int, target: Target) -> None:
    """Its source goes on at once, and is closed before the copy does."""
    target.tap((0, 1))
    text, other = tokens(150, seed=1), tokens(40, seed=2)
    source, _ = read(target, text)
    forked = target.fork(source, length, 250)
    assert forked is not None and (forked.length, forked.capacity) == (length, 250)
    target.verify([VerifyRows(source, other, EMPTY_PROPOSAL)])
    source.keep(range(40))
    source.close()
    whole_text, hidden = read(target, (*text[:length], *other))
    (output,) = target.verify([VerifyRows(forked, other, EMPTY_PROPOSAL, last_row_only=True)])
    forked.keep(range(40))
    drafts = Proposal.chain([5, 6, 7])
    ours, theirs = target.verify([VerifyRows(s, [4], drafts) for s in (forked, whole_text)])
    if isinstance(target, NativeTarget):
        assert torch.equal(output.hidden, hidden[length:])
        assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.hidden, theirs.hidden)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-9)
    for session in (forked, whole_text):
        session.close()


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("length", [1, 33, 80])
def test_a_copied_context_drafts_what_its_beginning_drafts(name: str, length: int) -> None:
    drafter = DRAFTERS[name]
    assert isinstance(drafter, Forkable)
    TARGET.tap(drafter.target_layer_ids)
    text = tokens(9, seed=3) * 9 + tokens(9)
    session, hidden = read(TARGET, text)
    session.close()

    def context(count: int) -> Any:
        opened = drafter.open(count)
        drafter.inject([opened], [hidden[:count]], [text[:count]])
        return opened

    source, expected = context(80), context(length)
    forked = drafter.fork(source, length, length + 10)
    assert forked is not None and forked.length == expected.length == length
    del source
    assert drafter.draft([text[5]], [forked], 4) == drafter.draft([text[5]], [expected], 4)
    more = drafter.open(length + 10)
    rows = hidden[: length + 10]
    drafter.inject([more], [rows], [text[: length + 10]])
    drafter.inject([forked], [rows[length:]], [text[length : length + 10]])
    assert forked.length == length + 10
    assert drafter.draft([text[5]], [forked], 4) == drafter.draft([text[5]], [more], 4)


# What is shared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", *sorted(DRAFTERS)])
def test_texts_of_one_request_read_its_prompt_once(name: str) -> None:
    made = request("a", tokens(100), 12, temperature=1.0, seed=5, n=3)
    engine = Engine(TARGET, DRAFTERS.get(name))
    ids = engine.add(made)
    while engine.has_work:
        engine.step()
    completions = [engine.take_completion(i) for i in ids]
    assert [c.num_reused_tokens for c in completions] == [0, 99, 99]
    assert completions[1].to_dict()["num_reused_tokens"] == 99
    plain = plain_texts(TARGET, made.samples())
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert len({c.token_ids for c in completions}) == 3
    assert all_slots_are_free(TARGET)


def test_nobody_waits_for_a_prompt_that_has_little_in_common() -> None:
    beginning = tokens(MIN_PREFIX - 1)
    made = [request(str(i), beginning + tokens(30, seed=i + 1), 3) for i in range(2)]
    engine = Engine(TARGET)
    for one in made:
        engine.add(one)
    assert [delta.request_id for delta in engine.step()] == ["0", "1"]
    engine.close()


@pytest.mark.parametrize(
    ("common", "reused"), [(MIN_PREFIX - 1, 0), (MIN_PREFIX, MIN_PREFIX), (60, 60), (100, 100)]
)
@pytest.mark.parametrize("parked", [False, True])
def test_as_much_is_reused_as_is_common(common: int, reused: int, parked: bool) -> None:
    first = request("first", tokens(100), 30 if not parked else 3)
    second = request("second", tokens(100)[:common] + tokens(20, seed=1), 8)
    engine = Engine(TARGET, DRAFTERS["dflash"], prefix_tokens=600 if parked else 0)
    engine.add(first)
    while engine.has_work if parked else engine.scheduler.waiting:
        engine.step()
    (completion,) = finish(engine, [second])
    assert completion.num_reused_tokens == reused
    assert completion.token_ids == plain_texts(TARGET, [second])[0].token_ids
    engine.close()


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_conversation_goes_on_where_it_stopped(name: str) -> None:
    """Each turn is held whole, at least up to its last token: that may be the anchor, whose K/V nobody has."""
    engine = Engine(TARGET, DRAFTERS[name], prefix_tokens=600)
    prompt = tokens(50)
    for turn in range(3):
        made = request(str(turn), prompt, 20)
        (completion,) = finish(engine, [made])
        assert completion.token_ids == plain_texts(TARGET, [made])[0].token_ids
        assert completion.num_reused_tokens in ((len(prompt) - 6, len(prompt) - 5) if turn else (0,))
        prompt = whole(completion) + tokens(5, seed=turn)
    assert len(engine.prefixes.parked) == 1, "what a longer text holds too was given back"
    engine.close()
    assert all_slots_are_free(TARGET)


def test_the_last_row_runs_though_all_is_known() -> None:
    engine = Engine(TARGET, DRAFTERS["dflash"], prefix_tokens=600)
    made = request("a", tokens(80), 5)
    first, second = (finish(engine, [made])[0] for _ in range(2))
    assert (first.num_reused_tokens, second.num_reused_tokens) == (0, 79)
    assert first.token_ids == second.token_ids
    engine.close()


def test_a_plain_text_lends_to_plain_texts_only() -> None:
    """It has no context."""
    engine = Engine(TARGET, DRAFTERS["dflash"], prefix_tokens=900)
    plainly, drafted = request("plain", tokens(80), 5), request("drafted", tokens(80), 5)
    plainly = replace(plainly, block_size=1)
    reused = [
        finish(engine, [one])[0].num_reused_tokens for one in (plainly, plainly, drafted, plainly, drafted)
    ]
    assert reused == [0, 79, 0, 79, 79]
    assert len(engine.prefixes.parked) == 1, "the drafted one serves both"
    engine.close()


class Stubborn(Watched):
    """Has a way to copy contexts, and never does."""

    def fork(self, context: Any, length: int, capacity: int) -> None:
        return None


@pytest.mark.parametrize(
    "drafter",
    [RandomDrafter(4, 61), Stubborn(tiny_drafter(TARGET, 4)), Combined(PromptLookup(), RandomDrafter(4, 61))],
    ids=["no fork", "none", "half a fork"],
)
def test_who_cannot_copy_reads_all(drafter: Drafter) -> None:
    engine = Engine(TARGET, drafter, prefix_tokens=600)
    made = [request(str(i), tokens(80), 6) for i in range(3)]
    completions = finish(engine, made)
    assert {c.num_reused_tokens for c in completions} == {0}
    assert {c.token_ids for c in completions} == {plain_texts(TARGET, made[:1])[0].token_ids}
    engine.close()
    assert all_slots_are_free(TARGET)


def test_a_target_that_cannot_copy_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TARGET, "fork", lambda *_: None)
    completions = finish(Engine(TARGET), [request(str(i), tokens(80), 6) for i in range(2)])
    assert {c.num_reused_tokens for c in completions} == {0}
    assert all_slots_are_free(TARGET)


# What is kept --------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_unless_asked_for() -> None:
    engine = Engine(TARGET)
    finish(engine, [request("a", tokens(80), 6)])
    assert all_slots_are_free(TARGET)
    with pytest.raises(ConfigError, match="prefix_tokens: expected at least 0, got -1"):
        Engine(TARGET, prefix_tokens=-1)


def test_what_was_used_least_recently_goes_first() -> None:
    """Three texts of 86 tokens fit (the last token's block is of one slot)."""
    engine = Engine(TARGET, prefix_tokens=3 * 86 + 85)
    made = [request(str(i), tokens(80, seed=i), 6) for i in range(4)]
    reused = [finish(engine, [made[i]])[0].num_reused_tokens for i in (0, 1, 2, 0, 3, 0, 1)]
    assert reused == [0, 0, 0, 79, 0, 79, 0]
    assert engine.prefixes.num_tokens == 3 * 86
    finish(engine, [request("longer", tokens(130, seed=9), 6)])
    assert len(engine.prefixes.parked) == 2, "each counts as much as the longest"
    finish(engine, [request("too long", tokens(400, seed=9), 6)])
    assert not engine.prefixes.parked
    assert all_slots_are_free(TARGET)


def test_what_was_lent_stays_though_the_text_took_another_turn() -> None:
    engine = Engine(TARGET, prefix_tokens=3 * 86)
    first, second, third = (request(str(i), tokens(80, seed=i), 6) for i in range(3))
    turned = request("turned", first.prompt_ids[:60] + tokens(20, seed=9), 6)
    reused = [finish(engine, [one])[0].num_reused_tokens for one in (first, second, third, turned, first)]
    assert reused == [0, 0, 0, 60, 79]
    assert finish(engine, [second])[0].num_reused_tokens == 0
    engine.close()


def test_a_cancelled_text_lends_too() -> None:
    engine = Engine(TARGET, prefix_tokens=600)
    engine.add(request("a", tokens(80), 50))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    assert finish(engine, [request("b", tokens(80), 6)])[0].num_reused_tokens == 79
    engine.close()


def test_what_is_kept_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(max_positions=512)
    opened = target.open
    monkeypatch.setattr(target, "open", lambda capacity: _at_most(2, target, opened, capacity))
    engine = Engine(target, prefix_tokens=900)
    made = [request(str(i), tokens(80, seed=i), 6) for i in range(3)]
    assert [c.finish_reason for one in made for c in finish(engine, [one])] == ["length"] * 3
    assert len(engine.prefixes.parked) == 2
    assert finish(engine, [made[2]])[0].num_reused_tokens == 79
    busy, waiting = request("busy", tokens(80, seed=7), 60), request("waiting", tokens(9), 6)
    engine.add(busy)
    engine.step()
    assert len(engine.prefixes.parked) == 1
    engine.add(waiting)
    engine.add(replace(waiting, id="too many"))
    while engine.has_work:
        engine.step()
    assert [len(m.tokens) for m in engine.prefixes.parked] == [139], "the busy one, now that it has ended"
    assert engine.take_completion("too many").finish_reason == "error"
    assert engine.take_completion("waiting").finish_reason == "length"
    assert len(engine.take_completion("busy").token_ids) == 60
    engine.close()
    assert all_slots_are_free(target)


def _at_most(count: int, target: NativeTarget, opened: Any, capacity: int) -> Any:
    num_slots = target._cache[0][0].shape[0] if target._cache else 0
    if num_slots - len(target._free) >= count:
        raise MemoryError("no slot")
    return opened(capacity)


@dataclass
class Running:
    tokens: tuple[int, ...]
    session: TargetSession
    context: None = None


texts = st.tuples(st.integers(0, 2), st.integers(1, 90)).map(
    lambda drawn: tokens(90, seed=drawn[0])[: drawn[1]]
)


@settings(deadline=None, max_examples=60)
@given(
    asked=st.lists(st.tuples(texts, st.integers(0, 60), st.booleans()), max_size=12),
    max_tokens=st.integers(0, 500),
)
def test_whatever_is_parked_is_bounded_and_true(
    asked: list[tuple[tuple[int, ...], int, bool]], max_tokens: int
) -> None:
    """Opened memory holds the longest beginning that anybody has, and parked memory is what it says."""
    cache, running = PrefixCache(max_tokens), list[Running]()
    for text, spare, stays in asked:
        held: list[Held] = [*cache.parked, *running]
        most = max((_common(text[:-1], m.tokens[: m.session.length]) for m in held), default=0)
        memory = cache.open(text, len(text) + spare, running, TARGET, None)
        if len(cache.parked) + len(running) == len(held):
            assert memory.session.length == (most if most >= MIN_PREFIX else 0)
        else:  # the longest text so far, beside which less can be kept
            assert memory.session.length <= most
        rest = text[memory.session.length :]
        TARGET.verify([VerifyRows(memory.session, rest, EMPTY_PROPOSAL, last_row_only=True)])
        memory.session.keep(range(len(rest)))
        if stays:
            running.append(Running(text, memory.session))
        else:
            cache.park(memory)
        assert cache.num_tokens <= max_tokens
        assert all(m.session.length == len(m.tokens) >= MIN_PREFIX for m in cache.parked)
        for kept in cache.parked:
            assert not any(
                kept is not other and _common(kept.tokens, other.tokens) == len(kept.tokens)
                for other in cache.parked
            ), "what another covers is not kept"
    for one in running:
        one.session.close()
    cache.close()
    assert not cache.parked and all_slots_are_free(TARGET)


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    while count < min(len(text), len(other)) and text[count] == other[count]:
        count += 1
    return count


def test_what_was_parked_is_of_use_to_a_checked_run() -> None:
    """Shared system prompts: each is read once, in whatever order the requests come."""
    systems = [tokens(60, seed=1), tokens(40, seed=2)]
    made = [request(str(i), systems[i % 2] + tokens(5 + i, seed=10 + i), 6) for i in range(8)]
    engine = Engine(TARGET, DRAFTERS["dflash"], max_sequences=3, prefix_tokens=600)
    completions = run_checked(engine, made)
    reused = [completions[one.id].num_reused_tokens for one in made]
    assert reused == [0, 0, 60, 40, 60, 40, 60, 40]
    plain = plain_texts(TARGET, made)
    assert [completions[c.request_id].token_ids for c in plain] == [c.token_ids for c in plain]
    assert all_slots_are_free(TARGET)


def test_there_is_no_room_even_so(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(target, "open", lambda capacity: _at_most(0, target, None, capacity))
    with pytest.raises(
        CapacityError, match=r"no memory for a text of 20 tokens \(no slot\); hint: fewer texts"
    ):
        PrefixCache(100).open((1, 2), 20, [], target, None)
