"""Arms of this process: what they report is what the engine did, under closed and open load, after failures too."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.bench.arms import local
from paceline.bench.arms.base import ArmError, Job, Load, Outcome, Passed, text_digest
from paceline.bench.arms.local import local_arm
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request, TokenDelta
from paceline.drafter.lookup import PromptLookup
from paceline.engine import step as engine_step
from paceline.engine.engine import Engine
from paceline.engine.runtime import peak_memory_bytes, reset_peak_memory
from paceline.llm import LLM
from paceline.target.native import NativeTarget
from tiny_llm import MAX_POSITIONS, tiny_llm
from watching import all_slots_are_free

KINDS = ("plain", "dflash", "lookup", "combined")
TEXTS = ("Say it.", "aaaa bbbb aaaa bbbb aaaa", "one two", "?", "What is it, then?", "abcabcabc")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"))


def jobs(count: int = 6, gap_s: float = 0.0, **options: Any) -> list[Job]:
    """Returns jobs of different lengths, one every `gap_s` seconds, no two with one seed."""
    params = SamplingParams(**{"max_new_tokens": 9, "temperature": 0.9, **options})
    return [
        Job(
            f"job-{i}",
            [{"role": "user", "content": TEXTS[i % len(TEXTS)]}],
            replace(params, seed=i, max_new_tokens=params.max_new_tokens + i % 3),
            due_s=gap_s * i,
        )
        for i in range(count)
    ]


def ignore(outcome: Outcome) -> None:
    """Is told and does nothing."""


def by_id(passed: Passed) -> dict[str, Outcome]:
    return {outcome.id: outcome for outcome in passed.outcomes}


def direct(llm: LLM, asked: Sequence[Job], **options: Any) -> dict[str, Completion]:
    """Returns what the engine says to each job by itself."""
    found = {}
    for job in asked:
        engine = llm.new_engine(**options, max_sequences=1)
        engine.add(Request(job.id, tuple(llm.render(job.messages)), job.params))
        while engine.has_work:
            engine.step()
        found[job.id] = engine.take_completion(job.id)
    return found


class Steps:
    """Watches every engine step: how many sequences ran and waited before it, and what came out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, list[TokenDelta]]] = []
        step = Engine.step

        def watched(engine: Engine) -> list[TokenDelta]:
            before = len(engine.scheduler.running), len(engine.scheduler.waiting)
            deltas = step(engine)
            self.seen.append((*before, deltas))
            return deltas

        patch.setattr(Engine, "step", watched)


# What an outcome says ------------------------------------------------------------------------------------------------

ARMS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("plain", {}, {"plain": True}),
    ("dflash", {}, {"tree_nodes": 2}),
    ("dflash", {"block_size": 3}, {"block_size": 3}),
    ("dflash", {"tree_nodes": 0}, {"tree_nodes": None}),
    ("dflash", {"tree_nodes": 6}, {"tree_nodes": 6}),
    ("lookup", {"block_size": 6, "max_ngram": 2}, {"drafter": PromptLookup(6, 2)}),
]


@pytest.mark.parametrize("load", [Load(3), Load(rate_per_s=1000.0)], ids=["closed", "open"])
@pytest.mark.parametrize(("kind", "options", "engine"), ARMS)
def test_outcomes_are_what_the_engine_says_to_each_alone(
    llm: LLM, kind: str, options: dict[str, int], engine: dict[str, Any], load: Load
) -> None:
    asked, told = jobs(5), list[Outcome]()
    passed = local_arm("arm", kind, options, llm).run(asked, load, told.append)
    assert tuple(told) == passed.outcomes
    assert sorted(by_id(passed)) == [job.id for job in asked]
    for name, completion in direct(llm, asked, **engine).items():
        outcome = by_id(passed)[name]
        steps = Counter((s.num_drafted, s.num_accepted) for s in completion.steps) if kind != "plain" else {}
        assert outcome.failure is None and outcome.finish_reason == completion.finish_reason
        assert outcome.num_prompt_tokens == len(completion.prompt_ids)
        assert outcome.num_new_tokens == len(completion.token_ids)
        assert outcome.text == text_digest(completion.token_ids)
        assert outcome.acceptance == tuple((*step, n) for step, n in sorted(steps.items()))
        assert outcome.num_chunks == 1 + len(completion.steps)


def test_all_kinds_give_one_text_twice(llm: LLM) -> None:
    texts = [
        {name: outcome.text for name, outcome in by_id(arm.run(jobs(), Load(2), ignore)).items()}
        for arm in (local_arm("arm", kind, {}, llm) for kind in KINDS)
        for _ in range(2)
    ]
    assert all(text == texts[0] for text in texts)
    assert len(set(texts[0].values())) == len(jobs())


@pytest.mark.parametrize("load", [Load(2), Load(rate_per_s=500.0)], ids=["closed", "open"])
def test_times_are_in_order(llm: LLM, load: Load) -> None:
    passed = local_arm("arm", "dflash", {}, llm).run(jobs(gap_s=0.002), load, ignore)
    ends = []
    for outcome in passed.outcomes:
        ttft, e2e, gap = outcome.ttft_s, outcome.e2e_s, outcome.max_gap_s
        assert ttft is not None and e2e is not None and gap is not None
        assert 0 < ttft <= e2e and 0 < gap <= e2e - ttft
        ends.append(outcome.sent_s + e2e)
    first = min(outcome.sent_s for outcome in passed.outcomes)
    assert ends == sorted(ends) and passed.wall_s >= ends[-1] - first


def test_one_token_has_no_gap(llm: LLM) -> None:
    (outcome,) = local_arm("arm", "dflash", {}, llm).run(jobs(1, max_new_tokens=1), Load(1), ignore).outcomes
    assert (outcome.num_new_tokens, outcome.num_chunks, outcome.max_gap_s) == (1, 1, None)
    assert outcome.ttft_s == outcome.e2e_s and outcome.acceptance == ()


# Load ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_a_closed_loop_is_full_to_its_end(
    llm: LLM, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = Steps(monkeypatch), jobs(7)
    local_arm("arm", "dflash", {}, llm).run(asked, Load(concurrency), ignore)
    num_finished = 0
    for running, waiting, deltas in steps.seen:
        assert running + waiting == min(concurrency, len(asked) - num_finished)
        num_finished += sum(delta.finish_reason is not None for delta in deltas)
    assert num_finished == len(asked)


def test_a_closed_loop_takes_jobs_in_order(llm: LLM) -> None:
    asked = jobs(5)[::-1]
    passed = local_arm("arm", "plain", {}, llm).run(asked, Load(1), ignore)
    assert [outcome.id for outcome in passed.outcomes] == [job.id for job in asked]
    assert [outcome.sent_s for outcome in passed.outcomes] == sorted(o.sent_s for o in passed.outcomes)


class Clock:
    """A clock that moves when someone sleeps, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_an_open_loop_sends_what_is_due(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far between, so each is finished before the next; given in another order than due."""
    clock, sent = Clock(), list[tuple[str, float]]()
    monkeypatch.setattr(local, "time", clock)
    add = Engine.add

    def watched(engine: Engine, request: Request) -> list[str]:
        sent.append((request.id, clock.now - 100.0))
        return add(engine, request)

    monkeypatch.setattr(Engine, "add", watched)
    asked = jobs(4, gap_s=50.0)
    passed = local_arm("arm", "dflash", {}, llm).run(asked[::-1], Load(rate_per_s=0.02), ignore)
    assert [name for name, _ in sent] == [job.id for job in asked]
    assert all(0 <= when - job.due_s < 1 for (_, when), job in zip(sent, asked, strict=True))
    assert len(clock.slept) == 3 and {o.sent_s for o in passed.outcomes} == {job.due_s for job in asked}
    assert 150 < passed.wall_s < 152


def test_an_open_loop_queues_beyond_what_the_pair_allows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All due at once: the pair's three step together, and waiting counts."""
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    steps = Steps(monkeypatch)
    passed = local_arm("arm", "plain", {}, llm).run(jobs(7), Load(speed=2.0), ignore)
    assert steps.seen[0][:2] == (0, 7)
    assert max(running for running, _, _ in steps.seen) == llm.max_sequences == 3
    waits = [by_id(passed)[f"job-{i}"].ttft_s or 0.0 for i in range(7)]
    assert all(outcome.sent_s == 0.0 for outcome in passed.outcomes)
    assert max(waits[:3]) < min(waits[3:])


# Step times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_read_no_prompt_are_timed(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    passed = local_arm("arm", kind, {}, llm).run(jobs(7), Load(3), ignore)
    pure = [(running, deltas[0].step) for running, waiting, deltas in steps.seen if not waiting]
    assert 0 < len(pure) < len(steps.seen)
    assert {t.num_sequences: t.num_steps for t in passed.step_times} == Counter(n for n, _ in pure)
    assert [t.num_sequences for t in passed.step_times] == sorted({n for n, _ in pure})
    for times in passed.step_times:
        records = [record for n, record in pure if n == times.num_sequences and record is not None]
        parts = ("draft_s", "verify_s", "sample_s", "inject_s", "keep_s")
        for part in parts:
            assert getattr(times, part) == pytest.approx(sum(getattr(record, part) for record in records))
        assert times.total_s >= sum(getattr(times, part) for part in parts) > 0
    assert passed.copy_bytes_per_s == ()


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_timed_by_their_rows(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    passed = local_arm("arm", kind, {}, llm).run(jobs(7), Load(3), ignore)
    pure = [
        (n, [delta.step for delta in deltas if delta.step])
        for n, waiting, deltas in steps.seen
        if not waiting
    ]
    for times in passed.step_times:
        same = [records for n, records in pure if n == times.num_sequences]
        counts = Counter(sum(1 + record.num_drafted for record in records) for records in same)
        assert {rows: count for rows, count, _, _ in times.passes} == counts
        assert [rows for rows, *_ in times.passes] == sorted(counts)
        assert sum(verify_s for *_, verify_s, _ in times.passes) == pytest.approx(times.verify_s)
        assert sum(sample_s for *_, sample_s in times.passes) == pytest.approx(times.sample_s)
    if kind == "plain":
        assert all(rows == t.num_sequences for t in passed.step_times for rows, *_ in t.passes)


def test_steps_with_a_piece_of_a_prompt_are_not_timed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in pieces of two tokens beside who decodes; those steps are longer, and not decoding alone."""
    monkeypatch.setattr(engine_step, "PREFILL_ROWS_BESIDE", 2)
    pure, num_beside, step = Counter[int](), 0, Engine.step

    def watched(engine: Engine) -> list[TokenDelta]:
        nonlocal num_beside
        reads = bool(engine.scheduler.waiting) or any(s.is_prefilling for s in engine.scheduler.running)
        deltas = step(engine)
        records = [delta.step for delta in deltas if delta.step is not None]
        if records and not reads:
            pure[records[0].num_sequences] += 1
        num_beside += bool(records) and reads
        return deltas

    monkeypatch.setattr(Engine, "step", watched)
    asked = jobs(3, ignore_eos=True)
    asked[0] = replace(asked[0], params=replace(asked[0].params, max_new_tokens=40))  # beside all others
    passed = local_arm("arm", "plain", {}, llm).run(asked, Load(2), ignore)
    assert {t.num_sequences: t.num_steps for t in passed.step_times} == pure
    assert num_beside > 3  # more than the steps in which one was admitted


def test_copies_are_measured_before_each_pass_where_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events, step = list[str](), Engine.step

    def copied(device: torch.device) -> tuple[float, ...]:
        events.append(f"copies on {device}")
        return 3e9, 2e9

    def stepped(engine: Engine) -> list[TokenDelta]:
        events.append("step")
        return step(engine)

    monkeypatch.setattr(local, "copy_rates", copied)
    monkeypatch.setattr(Engine, "step", stepped)
    arm = local_arm("arm", "plain", {}, llm, measures_copies=True)
    assert arm.run(jobs(2), Load(2), ignore).copy_bytes_per_s == (3e9, 2e9)
    assert events[0] == "copies on cpu" and set(events[1:]) == {"step"}


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [Load(2), Load(speed=1.0)], ids=["closed", "open"])
def test_what_is_refused_is_a_row_and_the_rest_goes_on(llm: LLM, load: Load) -> None:
    asked = jobs(4)
    asked[1] = replace(asked[1], messages=[{"role": "user", "content": "x" * MAX_POSITIONS}])
    asked[2] = replace(asked[2], messages=[{"role": "judge", "content": "x"}])
    told: list[Outcome] = []
    passed = local_arm("arm", "dflash", {}, llm).run(asked, load, told.append)
    found = by_id(passed)
    assert "job-1: prompt of 131 + max_new_tokens of 10 exceed the 128 positions" in (
        found["job-1"].failure or ""
    )
    assert (found["job-2"].failure or "").startswith("job-2: messages[0].role")
    assert found["job-1"] == Outcome("job-1", found["job-1"].failure, found["job-1"].sent_s)
    assert found["job-0"].failure is None and found["job-3"].failure is None and len(told) == 4
    assert found["job-3"].text == text_digest(direct(llm, asked[3:])["job-3"].token_ids)


def test_all_refused_is_a_pass(llm: LLM) -> None:
    asked = [replace(job, messages=[]) for job in jobs(3)]
    passed = local_arm("arm", "plain", {}, llm).run(asked, Load(1), ignore)
    assert all(outcome.failure and outcome.e2e_s is None for outcome in passed.outcomes)
    assert len(passed.outcomes) == 3 and passed.step_times == ()


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_an_end_without_an_answer_is_no_success(
    llm: LLM, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, ended = Engine.step, list[str]()

    def end_one(engine: Engine) -> list[TokenDelta]:
        deltas = step(engine)
        for sequence in engine.scheduler.running:
            if sequence.request.id == "job-1" and not ended:
                ended.append("job-1")
                sequence.end(reason)
                engine._retire()
                if reason != "error":  # which the engine says itself
                    deltas.append(TokenDelta("job-1", (), finish_reason=reason))
        return deltas

    monkeypatch.setattr(Engine, "step", end_one)
    found = by_id(local_arm("arm", "plain", {}, llm).run(jobs(3), Load(2), ignore))
    assert found["job-1"].failure == f"job-1: ended without an answer ({reason})"
    assert found["job-1"].text is None and found["job-0"].failure is found["job-2"].failure is None


def interrupt_outcome(patch: pytest.MonkeyPatch) -> None:
    """Nothing to patch: `done` itself raises."""


def interrupt_pass(patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the target's 6th pass."""
    verify, count = NativeTarget.verify, iter(range(99))

    def verify_until(target: NativeTarget, batch: Any) -> Any:
        if next(count) == 5:
            raise KeyboardInterrupt
        return verify(target, batch)

    patch.setattr(NativeTarget, "verify", verify_until)


@pytest.mark.parametrize("interrupt", [interrupt_outcome, interrupt_pass])
def test_an_arm_is_usable_after_ctrl_c(llm: LLM, interrupt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    arm = local_arm("arm", "dflash", {}, llm)
    expected = by_id(arm.run(jobs(), Load(3), ignore))
    with monkeypatch.context() as patch:
        interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            arm.run(jobs(), Load(3), stop)
    assert isinstance(llm.target, NativeTarget) and all_slots_are_free(llm.target)
    again = by_id(arm.run(jobs(), Load(3), ignore))
    assert {name: o.text for name, o in again.items()} == {name: o.text for name, o in expected.items()}


def test_a_step_that_fails_ends_the_arm_and_frees_its_memory(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(target: NativeTarget, batch: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(NativeTarget, "verify", exhausted)
    with pytest.raises(ArmError, match=r"^mine: a step failed \(no memory is left\)$"):
        local_arm("mine", "plain", {}, llm).run(jobs(), Load(2), ignore)
    assert isinstance(llm.target, NativeTarget) and all_slots_are_free(llm.target)


# Memory -----------------------------------------------------------------------------------------------------------


def test_peak_memory_is_of_the_pass() -> None:
    cpu = torch.device("cpu")
    if not reset_peak_memory(cpu) or peak_memory_bytes(cpu) is None:
        pytest.skip("this system does not say")
    before = peak_memory_bytes(cpu) or 0
    with mmap.mmap(-1, 160_000_000) as pages:  # from the system: the allocator may hold as much already
        pages.write(bytes(range(256)) * 625_000)
    assert (peak_memory_bytes(cpu) or 0) > before + 100_000_000
    reset_peak_memory(cpu)
    assert (peak_memory_bytes(cpu) or 0) < before + 100_000_000
