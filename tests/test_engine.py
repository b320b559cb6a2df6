"""The engine's manners: what it refuses, in which order it admits, what it delivers, and that it gives memory back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.errors import CapacityError, ConfigError, RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.engine.sequence import room
from paceline.target.native import NativeTarget
from paceline.testing import (
    ConstantDrafter,
    Memory,
    OracleDrafter,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    whole,
)


@pytest.fixture
def target() -> NativeTarget:
    return tiny_target()


def request(name: str, *prompt: int, block_size: int | None = None, **params: Any) -> Request:
    return Request(
        name,
        prompt or (3, 1, 4),
        SamplingParams(**{"ignore_eos": True, "max_new_tokens": 12} | params),
        block_size,
    )


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt: expected at least one token, got none"),
        ((1, 61), r"prompt: token ids must be in 0…60, got 61"),
        ((-1,), "got -1"),
    ],
)
def test_prompts_that_make_no_sense(prompt: tuple[int, ...], message: str, target: NativeTarget) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(target).add(Request("a", prompt))


def test_an_id_is_held_once(target: NativeTarget) -> None:
    engine = Engine(target, max_sequences=1)
    engine.add(request("a"))
    with pytest.raises(RequestError, match="'a' is already waiting or running"):
        engine.add(request("a"))
    engine.step()
    with pytest.raises(RequestError, match="'a' is already waiting or running"):
        engine.add(request("a"))
    while engine.has_work:
        engine.step()
    engine.add(request("a"))
    engine.close()


def test_what_can_never_fit_is_refused(target: NativeTarget) -> None:
    engine = Engine(target)
    engine.add(request("fits", *range(28), max_new_tokens=100))
    with pytest.raises(
        CapacityError, match=r"29 \+ max_new_tokens of 100 exceed the 128 positions of tiny; hint"
    ):
        engine.add(request("does not", *range(29), max_new_tokens=100))
    engine.close()


@pytest.mark.parametrize("block_size", [0, -1, 5])
def test_blocks_a_drafter_was_not_made_for(block_size: int, target: NativeTarget) -> None:
    drafter = ConstantDrafter(4, 7)
    with pytest.raises(ConfigError, match=rf"block_size: expected 1…4 .*got {block_size}"):
        Engine(target, drafter, block_size=block_size)
    with pytest.raises(ConfigError, match=rf"block_size: expected 1…4 .*got {block_size}"):
        Engine(target, drafter).add(request("a", block_size=block_size))
    with pytest.raises(ConfigError, match="no drafter is loaded"):
        Engine(target, block_size=2)


def test_at_least_one_sequence(target: NativeTarget) -> None:
    with pytest.raises(ConfigError, match="max_sequences: expected at least 1, got 0"):
        Engine(target, max_sequences=0)


def test_a_drafter_taps_layers_that_exist(target: NativeTarget) -> None:
    deep = tiny_drafter(tiny_target(num_layers=5), 4, target_layer_ids=(0, 4))
    with pytest.raises(Exception, match=r"target layer id 4: expected 0…1 for tiny"):
        Engine(target, deep)


# Admission and delivery ----------------------------------------------------------------------------------------------


def test_first_come_first_served(target: NativeTarget) -> None:
    engine = Engine(target, max_sequences=2)
    for i, length in enumerate([3, 1, 5, 2]):
        engine.add(request(str(i), max_new_tokens=length))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [delta.request_id for delta in deltas if delta.step is None] == ["0", "1", "2", "3"]
    assert {delta.step.num_sequences for delta in deltas if delta.step} == {1, 2}


def test_requests_may_come_at_any_time(target: NativeTarget) -> None:
    early, late = request("early", 3, 1, 4, max_new_tokens=9), request("late", 2, 7, max_new_tokens=9)
    plain = {c.request_id: c.token_ids for c in plain_texts(target, [early, late])}
    engine = Engine(target, tiny_drafter(target, 4))
    engine.add(early)
    engine.step()
    engine.step()
    engine.add(late)
    while engine.has_work:
        engine.step()
    assert {name: engine.take_completion(name).token_ids for name in plain} == plain


def test_a_completion_is_taken_once(target: NativeTarget) -> None:
    engine = Engine(target)
    engine.add(request("a", max_new_tokens=3))
    with pytest.raises(KeyError):
        engine.take_completion("a")
    while engine.has_work:
        engine.step()
    assert len(engine.take_completion("a").token_ids) == 3
    with pytest.raises(KeyError):
        engine.take_completion("a")


def test_a_request_chooses_its_own_block(target: NativeTarget) -> None:
    made = [request("plain", block_size=1), request("three", block_size=3), request("all")]
    texts = [whole(completion) for completion in plain_texts(target, made)]
    engine = Engine(target, OracleDrafter(6, texts[1:]))  # a plain request opens no context
    completions = run_checked(engine, made)
    assert {step.num_drafted for step in completions["plain"].steps} == {0}
    assert max(step.num_drafted for step in completions["three"].steps) == 2
    assert max(step.num_drafted for step in completions["all"].steps) == 5
    smaller = run_checked(Engine(target, OracleDrafter(6, texts[2:]), block_size=2), made[2:])
    assert max(step.num_drafted for step in smaller["all"].steps) == 1


def test_deltas_say_which_tokens_were_drafts(target: NativeTarget) -> None:
    (text,) = plain_texts(target, [request("a", max_new_tokens=9)])
    engine = Engine(target, OracleDrafter(4, [whole(text) + (5,) * 9]))  # drafts on beyond the end
    engine.add(request("a", max_new_tokens=9))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4]
    assert [delta.num_drafted_tokens for delta in deltas] == [0, 3, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0].step is None
    assert [delta.step.position for delta in deltas if delta.step] == [4, 8]


class Letters:
    """A decoder that holds one token back."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.held + "".join(f"<{i}>" for i in ids)
        cut_at = text.rfind("<")
        self.held, given = text[cut_at:], text[:cut_at]
        return given

    def flush(self) -> str:
        given, self.held = self.held, ""
        return given


@pytest.mark.parametrize("cancelled_at", [None, 1])
def test_text_comes_whole_however_it_ends(cancelled_at: int | None, target: NativeTarget) -> None:
    engine = Engine(target, new_decoder=Letters)
    engine.add(request("a", max_new_tokens=4))
    engine.add(request("short", max_new_tokens=1))
    texts = {"a": "", "short": ""}
    for number in range(9):
        if number == cancelled_at:
            engine.cancel("a")
        for delta in engine.step():
            texts[delta.request_id] += delta.text
    for name in texts:
        completion = engine.take_completion(name)
        assert completion.text == "".join(f"<{i}>" for i in completion.token_ids)
        if completion.finish_reason != "cancelled":
            assert texts[name] == completion.text


@pytest.mark.parametrize("block_size", [1, 2, 4, 7])
@pytest.mark.parametrize("first", [1, 4, 8])
def test_a_stop_string_ends_a_text_wherever_it_falls_in_a_block(
    block_size: int, first: int, target: NativeTarget
) -> None:
    (plain,) = plain_texts(target, [request("a")])
    ids = plain.token_ids
    stop = f"{ids[first]}><{ids[first + 1]}"  # ends inside a token's text, and begins inside another's
    made = request("a", stop=(stop, "never"), logprobs=1)
    engine = Engine(target, OracleDrafter(7, [whole(plain)]), block_size=block_size, new_decoder=Letters)
    engine.add(made)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    completion = engine.take_completion("a")
    everything = "".join(f"<{i}>" for i in ids)
    assert completion.text == "".join(delta.text for delta in deltas) == everything[: everything.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    shown = completion.text.count(">")
    assert completion.token_ids == ids[: shown + 3], "the decoder is one token behind"
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    assert sum(step.num_emitted for step in completion.steps) == len(completion.token_ids) - 1
    assert all_slots_are_free(target)


def test_an_end_of_text_waits_for_min_new_tokens(target: NativeTarget) -> None:
    """Every token is an end but two, so that the first token that may end the text does."""
    ends = tuple(range(59))
    for minimum in (0, 1, 5):
        made = request(
            "a", stop_token_ids=ends, min_new_tokens=minimum, temperature=0.0, logit_bias={3: 90.0}
        )
        completion = run_checked(Engine(target, tiny_drafter(target, 4)), [made])["a"]
        assert len(completion.token_ids) == minimum + 1
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", 3)


# Memory --------------------------------------------------------------------------------------------------------------


def all_slots_are_free(target: NativeTarget) -> bool:
    num_slots = target._cache[0][0].shape[0] if target._cache else 0
    return sorted(target._free) == list(range(num_slots))


def test_closing_cancels_everything(target: NativeTarget) -> None:
    engine = Engine(target, tiny_drafter(target, 4), max_sequences=2)
    for i in range(5):
        engine.add(request(str(i)))
    engine.step()
    assert not all_slots_are_free(target)
    engine.close()
    assert not engine.has_work
    assert all_slots_are_free(target)
    assert {engine.take_completion(str(i)).finish_reason for i in range(5)} == {"cancelled"}


class Broken(ConstantDrafter):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(4, 7)
        self.where = where

    def open(self, capacity: int) -> Memory:
        self._fail("open")
        return super().open(capacity)

    def inject(
        self, contexts: Sequence[Memory], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        self._fail("inject")
        super().inject(contexts, hidden, tokens)

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise MemoryError(where)


def test_a_request_without_memory_ends_alone(target: NativeTarget) -> None:
    engine = Engine(target, Broken("open"))
    engine.add(request("a"))
    engine.add(request("plain", block_size=1))  # opens no context
    deltas = engine.step()
    assert [(d.request_id, d.token_ids, d.finish_reason) for d in deltas if d.finish_reason] == [
        ("a", (), "error")
    ]
    completion = engine.take_completion("a")
    assert (completion.finish_reason, completion.token_ids) == ("error", ())
    assert completion.stop_reason == "no memory for a text of 18 tokens (open); hint: fewer texts at once"
    while engine.has_work:
        engine.step()
    assert len(engine.take_completion("plain").token_ids) == 12
    assert all_slots_are_free(target)


def test_a_prefill_that_fails_can_be_repeated_or_left(target: NativeTarget) -> None:
    (plain,) = plain_texts(target, [request("a")])
    for is_left in (False, True):
        drafter = Broken("inject")
        engine = Engine(target, drafter)
        engine.add(request("a"))
        with pytest.raises(MemoryError, match="inject"):
            engine.step()
        drafter.where = "nowhere"
        if is_left:
            engine.close()
        while engine.has_work:
            engine.step()
        expected = ("cancelled", ()) if is_left else ("length", plain.token_ids)
        completion = engine.take_completion("a")
        assert (completion.finish_reason, completion.token_ids) == expected
        assert all_slots_are_free(target)


def test_a_sequence_has_room_for_one_block_beyond_its_end() -> None:
    assert room(10, 20, 8, 100) == 37
    assert room(10, 20, 1, 100) == 30
    assert room(10, 20, 8, 32) == 32


def test_engines_that_share_a_target_do_not_disturb_each_other() -> None:
    target = tiny_target(seed=5)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    speculative = Engine(target, tiny_drafter(target, 4))
    speculative.add(Request("a", (1, 2, 3), params))
    speculative.step()
    plain = Engine(target)
    plain.add(Request("a", (1, 2, 3), params))
    while speculative.has_work or plain.has_work:
        plain.step()
        speculative.step()
    assert speculative.take_completion("a").token_ids == plain.take_completion("a").token_ids


def test_an_admission_that_fails_loses_no_word_of_those_before_it(target: NativeTarget) -> None:
    drafter = Broken("nowhere")
    engine = Engine(target, drafter, max_sequences=2)
    engine.add(request("a"))
    delivered = [token for delta in engine.step() for token in delta.token_ids]
    engine.add(request("b"))
    drafter.where = "open"
    reasons = {}
    while engine.has_work:
        for delta in engine.step():
            delivered += delta.token_ids
            reasons[delta.request_id] = delta.finish_reason
    assert tuple(delivered) == engine.take_completion("a").token_ids
    assert reasons == {"a": "length", "b": "error"}
