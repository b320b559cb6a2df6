"""Other implementations as arms: their texts and rounds are ours, and what they cannot do is said."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench.arms import oracles
from paceline.bench.arms.base import ArmError, Job, Load, Outcome
from paceline.bench.arms.local import local_arm
from paceline.bench.arms.oracles import Transformers, build_assistant
from paceline.bench.arms.references import REFERENCE_KINDS, ReferenceArm, reference_arm
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.cli.demo import load_demo_prompts
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.testing import run_checked, tiny_drafter, tiny_eagle3, tiny_target
from test_drafter_parity import BLOCK, NUM_NEW, VARIANTS, VOCAB, transformers_model

DFLASH_KINDS = ("transformers-dflash", "zlab")
PROMPTS = (
    *(p.prompt for p in load_demo_prompts(None)[:2]),
    "What is the capital of France? Answer with one word.",
)
GREEDY = SamplingParams(20)
ONE_AT_ONCE = Load(1)


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if "three taps" not in name and "dflash 2" not in name]
)  # see the refusals
def test_transformers_own_dflash_takes_our_rounds(variant: str) -> None:
    """Its loop and its drafter, with the masks of z-lab's format, on texts longer than any window."""
    num_accepted = 0
    for seed in range(2):
        target = tiny_target(seed, vocab_size=VOCAB, num_layers=5)
        drafter = tiny_drafter(target, BLOCK, seed=seed, **VARIANTS[variant])
        prompt = (3, 1, 5, 4, 6, 0, 2, 3)
        ours = run_checked(
            Engine(target, drafter), [Request("text", prompt, SamplingParams(NUM_NEW, ignore_eos=True))]
        )["text"]
        assistant = build_assistant(DrafterCheckpoint.of(drafter, torch.float64, {}), torch.float64)
        oracle = Transformers(assistant_model=assistant, speculation_type="dflash")
        endless: Any = SimpleNamespace(codec=SimpleNamespace(eos_token_ids=()))
        oracle.open(endless, transformers_model(seed))
        trace = oracle.decode(prompt, SamplingParams(NUM_NEW))
        assert tuple(trace.ids) == ours.token_ids
        assert trace.sizes == [1, *(step.num_emitted for step in ours.steps)]
        num_accepted += sum(step.num_accepted for step in ours.steps)
    assert num_accepted > 10, "a comparison without accepted drafts would say little"


@cache
def pair() -> LLM:
    """The default pair in float32."""
    return LLM(dtype="float32")


@cache
def opened(kind: str) -> ReferenceArm:
    """An open arm of the default pair; they share a copy of the target."""
    arm = reference_arm(kind, kind, {}, pair())
    arm.open()
    return arm


def job(name: str, prompt: str, params: SamplingParams = GREEDY) -> Job:
    """One user message."""
    return Job(name, [{"role": "user", "content": prompt}], params)


JOBS = tuple(job(f"job-{i}", prompt) for i, prompt in enumerate(PROMPTS))


def answers(arm: Any, *jobs: Job, load: Load = ONE_AT_ONCE) -> list[Outcome]:
    """Runs a pass; `done` must hear of each outcome, in order."""
    heard: list[Outcome] = []
    passed = arm.run(jobs, load, heard.append)
    assert tuple(heard) == passed.outcomes and passed.wall_s > 0
    return heard


@cache
def theirs(kind: str) -> tuple[Outcome, ...]:
    """Another implementation's answers."""
    return tuple(answers(opened(kind), *JOBS))


@cache
def ours() -> tuple[Outcome, ...]:
    """Our own plain answers."""
    return tuple(answers(local_arm("plain", "plain", {}, pair()), *JOBS))


@cache
def our_chains() -> tuple[Completion, ...]:
    """Our answers with chains of the whole block, drafted with the whole head: others know no vocabulary of drafts."""
    checkpoint = pair().checkpoint
    assert checkpoint is not None
    engine = Engine(pair().target, checkpoint.build(torch.float32).bind(pair().target.heads), max_sequences=1)
    requests = [Request(j.id, tuple(pair().render(j.messages)), j.params) for j in JOBS]
    return tuple(run_checked(engine, requests).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFERENCE_KINDS)
def test_texts_are_ours(kind: str) -> None:
    got = theirs(kind)
    for outcome, own in zip(got, ours(), strict=True):
        assert outcome.failure is None and outcome.id == own.id
        assert (outcome.text, outcome.finish_reason) == (own.text, own.finish_reason)
        assert outcome.num_prompt_tokens == own.num_prompt_tokens
        assert outcome.num_new_tokens == own.num_new_tokens
        assert outcome.ttft_s is not None and outcome.e2e_s is not None and outcome.max_gap_s is not None
        assert outcome.ttft_s > 0 and outcome.ttft_s + outcome.max_gap_s <= outcome.e2e_s
        assert outcome.num_chunks is not None and outcome.acceptance is not None
        if kind != "transformers":
            assert outcome.num_chunks == 1 + sum(count for _, _, count in outcome.acceptance)
            num_accepted = sum(accepted * count for _, accepted, count in outcome.acceptance)
            assert num_accepted + outcome.num_chunks == own.num_new_tokens
    assert [outcome.finish_reason for outcome in got] == ["length", "length", "stop"]


@pytest.mark.slow
def test_plain_decoding_drafts_nothing_and_lookup_drafts_at_most_what_it_may() -> None:
    plain = answers(opened("transformers"), JOBS[2])[0]
    assert plain.acceptance == () and plain.num_chunks == plain.num_new_tokens
    lookup = reference_arm("lookup", "transformers-lookup", {"num_tokens": 3}, pair())
    assert lookup.open().speculation == {"kind": "lookup", "num_tokens": "3"}
    steps = answers(lookup, JOBS[0])[0].acceptance
    lookup.close()
    assert steps is not None and {0, 3} <= {num_drafted for num_drafted, _, _ in steps} <= {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DFLASH_KINDS)
def test_rounds_are_those_of_our_chains(kind: str) -> None:
    for outcome, own in zip(theirs(kind), our_chains(), strict=True):
        assert outcome.acceptance is not None
        accepted = Counter[int]()
        for num_drafted, num_accepted, count in outcome.acceptance:
            assert num_accepted <= num_drafted <= 7
            accepted[num_accepted] += count
        assert accepted == Counter(step.num_emitted - 1 for step in own.steps)
        assert sum(step.num_accepted for step in own.steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFERENCE_KINDS)
def test_a_seed_repeats_a_sampled_text(kind: str) -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    jobs = [
        job(str(seed), PROMPTS[0], SamplingParams(6, temperature=1.0, top_p=0.95, seed=seed))
        for seed in (3, 4, 3)
    ]
    first, second, again = answers(opened(kind), *jobs)
    assert first.text == again.text != second.text
    assert first.acceptance == again.acceptance
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers change"


@pytest.mark.slow
def test_a_failing_job_stops_no_other() -> None:
    too_long = job("long", "word " * 9000)
    unkept = job("unkept", PROMPTS[0], SamplingParams(4, repetition_penalty=1.3))
    last = job("last", PROMPTS[2], SamplingParams(2))
    got = answers(opened("zlab"), too_long, unkept, last)
    assert [outcome.id for outcome in got] == ["long", "unkept", "last"]
    assert "long: prompt of 9" in str(got[0].failure) and "8192 positions" in str(got[0].failure)
    assert "max_new_tokens, temperature, top_p, top_k and seed only" in str(got[1].failure)
    assert (got[0].e2e_s, got[0].text, got[0].num_new_tokens) == (None, None, None)
    assert got[2].failure is None and got[2].num_new_tokens == 2


@pytest.mark.slow
def test_what_others_raise_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    arm, calls = opened("transformers"), [0]

    def generate(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        raise KeyError("position_ids") if calls[0] == 1 else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arm._oracle._model, "generate", generate)  # type: ignore[attr-defined]  # transformers' own
        assert "transformers 5" in str(answers(arm, JOBS[2])[0].failure)
        with pytest.raises(KeyboardInterrupt):
            answers(arm, JOBS[2])
    assert answers(arm, JOBS[2])[0].text == ours()[2].text


@pytest.mark.slow
def test_an_open_loop_queues_and_counts_from_when_a_job_was_due() -> None:
    jobs = [job(name, PROMPTS[2], SamplingParams(2)) for name in ("one", "two")]
    one, two = answers(opened("transformers"), *jobs, load=Load(rate_per_s=1.0))
    assert one.sent_s == two.sent_s == 0.0
    assert one.e2e_s is not None and two.ttft_s is not None and two.ttft_s > one.e2e_s


@pytest.mark.slow
def test_fingerprints_differ_from_ours_in_what_is_theirs() -> None:
    plain, dflash = (local_arm("ours", k, {}, pair()).open() for k in ("plain", "dflash"))
    for kind in REFERENCE_KINDS:
        found = opened(kind).open()
        differing = {entry for entry in found.basis if found.basis[entry] != plain.basis.get(entry)}
        assert differing == {"engine", "backend", "exact"} and found.basis.keys() == plain.basis.keys()
        assert found.memory["target_weights"] == plain.memory["target_weights"]
        assert bool(found.speculation) == (kind != "transformers")
        if kind in DFLASH_KINDS:
            assert found.speculation == {**dflash.speculation, "block_size": "8", "tree_nodes": "0"}
            assert 0 < found.memory["drafter_weights"] < dflash.memory["drafter_weights"]  # no cut head
    assert opened("zlab").open().basis["engine"].startswith("z-lab dflash 0.1.0 on transformers 5.")


@pytest.mark.slow
def test_arms_share_one_copy_and_the_last_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []

    def load(llm: LLM) -> Any:
        model = torch.nn.Linear(1, 1)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(oracles, "load_target", load)
    llm = LLM(drafter=None, dtype="float32")
    arms = [reference_arm(str(i), "transformers", {}, llm) for i in range(2)]
    for arm in (*arms, *arms):
        arm.open()
    assert len(loaded) == 1
    arms[0].close()
    arms[0].close()
    assert loaded[0]() is not None
    arms[1].close()
    assert loaded[0]() is None
    arms[0].open()
    assert len(loaded) == 2
    arms[0].close()
    with pytest.raises(ArmError, match="the pair has none"):
        ReferenceArm("drafterless", llm, "zlab", {}).open()
    assert len(loaded) == 3 and loaded[2]() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "module", "hint"),
    [
        ("zlab", "dflash", "pip install --no-deps dflash==0.1.0"),
        ("transformers-dflash", "transformers.models.muse_glimmer_assistant", "5.24 or newer"),
    ],
)
def test_a_package_that_is_not_there_is_named(
    kind: str, module: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    if "." in module:
        parent, _, child = module.rpartition(".")
        monkeypatch.delitem(vars(sys.modules[parent]), child, raising=False)
    arm = reference_arm("theirs", kind, {}, pair())
    with pytest.raises(ArmError, match=hint):
        arm.open()
    with pytest.raises(ArmError, match="expected to be open"):
        answers(arm, JOBS[2])


@pytest.mark.slow
def test_refusals_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            reference_arm("theirs", kind, options, pair())
        return str(caught.value)

    assert refused("vllm") == f"arm 'theirs': expected one of {', '.join(REFERENCE_KINDS)}; got 'vllm'"
    assert refused("zlab", block_size=4) == "arm 'theirs': zlab has the options none; got 'block_size'"
    assert "has the options num_tokens; got 'ngram'" in refused("transformers-lookup", ngram=4)
    for value in (0, True, 2.5, "4"):
        assert "whole number of at least 1" in refused("transformers-lookup", num_tokens=value)
    with pytest.raises(ArmError, match="2 at once"):
        answers(opened("transformers"), JOBS[2], load=Load(2))
    checkpoint = pair().checkpoint
    assert checkpoint is not None
    last = replace(checkpoint, config=replace(checkpoint.config, target_layer_ids=(1, 29)))
    monkeypatch.setattr(pair(), "checkpoint", last)
    for kind in DFLASH_KINDS:
        with pytest.raises(ArmError, match=r"reads layer 29, the last one, .* behind the final norm"):
            reference_arm("theirs", kind, {}, pair()).open()
    drafter = tiny_drafter(tiny_target(), BLOCK, variant="dflash2")
    with pytest.raises(ArmError, match="of the first kind alone"):
        build_assistant(DrafterCheckpoint.of(drafter, torch.float64, {}), torch.float64)
    eagle = DrafterCheckpoint.of(tiny_eagle3(tiny_target(), BLOCK), torch.float64, {})
    monkeypatch.setattr(pair(), "checkpoint", eagle)
    for kind in DFLASH_KINDS:
        with pytest.raises(ArmError, match="got an EAGLE-3 one"):
            reference_arm("theirs", kind, {}, pair()).open()
    monkeypatch.setattr(pair(), "checkpoint", None)
    for kind in DFLASH_KINDS:
        assert "needs a drafter" in refused(kind)
