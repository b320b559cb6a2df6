"""`adapt`: the drafter in use, fine-tuned on your own traffic within a given time, and kept only where that helps.

Traffic is split into prompts to learn from and prompts to judge by. The target answers the first, mixed with general
prompts; the trainer fine-tunes the drafter on the answers; then both drafters decode the second, in turns. A plan (how
many answers, steps and measurements fit into the time) is made once, from what the first of each took, and stored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import WEIGHTS, DrafterCheckpoint
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.tables import from_table
from paceline.drafter.base import NeuralDrafter
from paceline.engine.runtime import machine
from paceline.llm import LLM, shipped_drafter
from paceline.target.folder import sha256_of
from paceline.train.adaptation.evaluate import evaluate
from paceline.train.adaptation.foretell import Chains, compare_foretold
from paceline.train.adaptation.judge import RULE, arms_of, compare, verdict
from paceline.train.adaptation.pace import (
    ANSWERS_SHARE,
    JUDGED_PER_SHARD,
    JUDGING_SHARE,
    MAX_JUDGED,
    MEASURING_SHARE,
    PROMPTS_PER_SHARD,
    Plan,
    Watch,
    affordable,
)
from paceline.train.adaptation.recipe import PROMPTS, recipe
from paceline.train.adaptation.records import Adaptation, AdaptConfig, AdaptEvent
from paceline.train.adaptation.split import Row, Traffic, mix
from paceline.train.config import TrainConfig
from paceline.train.data.documents import collect
from paceline.train.data.features import Document
from paceline.train.data.prompts import Prompt, digest
from paceline.train.diagnosis.scores import Scorer
from paceline.train.run import TrainEvent, train
from paceline.train.trainer import Progress

PLAN, REPORT = "plan.json", "report.json"

Observe = Callable[[AdaptEvent], None]


def adapt(
    config: AdaptConfig,
    rows: Sequence[Row],
    general: Sequence[Row],
    *,
    observe: Observe = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    resume: bool = True,
    offline: bool = False,
) -> Adaptation:
    """Returns what came of adapting a drafter to traffic; `config.out` holds all of it and is gone on with.

    Args:
        rows: the traffic, in rows of `core.prompts`.
        general: prompts of other kinds: every other one of each category is rehearsed, the others judge that general
            use did not suffer.
        should_stop: asked between steps.

    Raises:
        ConfigError: too few prompts, a value that does not fit, or a folder that belongs to another adaptation.
        IncompatiblePairError: a drafter of another target.
        KeyboardInterrupt: asked to stop; the same call goes on from what is stored.
    """
    return _Adapting(config, observe, should_stop, offline).run(rows, general, resume)


class _Adapting:
    """One adaptation on its way."""

    def __init__(
        self, config: AdaptConfig, observe: Observe, should_stop: Callable[[], bool], offline: bool
    ) -> None:
        self.config, self.out, self.offline = config, Path(config.out), offline
        self.observe, self.should_stop = observe, should_stop
        self.old = _drafter_folder(config)
        self.checkpoint = DrafterCheckpoint.load(self.old)
        self.started = time.perf_counter()
        self.plan = Plan("")
        self.facts: dict[str, Any] = {}
        self.held_out: list[Prompt] = []
        self.judged: list[Prompt] = []

    def run(self, rows: Sequence[Row], general: Sequence[Row], resume: bool) -> Adaptation:
        """Returns the result, all stages done."""
        llm = self._open()
        learnt = self._split(rows, general, llm, resume)
        if (self.out / REPORT).exists():
            return self._result(_read_json(self.out / REPORT))
        if self.plan.num_held_out is None:
            self._plan_measuring(llm)
        if self.plan.judged_held_out is None:
            self._plan_judging(llm)
        del llm  # the trainer loads the target for itself
        self._train(learnt)
        return self._judge()

    def _open(self) -> LLM:
        return LLM(self.config.target, self.old, max_sequences=1, offline=self.offline)

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _split(self, rows: Sequence[Row], general: Sequence[Row], llm: LLM, resume: bool) -> list[Prompt]:
        """Returns the prompts to learn from. Mutates: the sets to judge by, facts, plan, and the folder."""
        config = self.config
        longest = min(config.max_prompt_tokens, llm.target.spec.max_positions - config.max_new_tokens)
        if longest < 1:
            raise ConfigError(
                f"max_new_tokens: expected less than the {llm.target.spec.max_positions} positions of "
                f"{llm.target.spec.name}, got {config.max_new_tokens}"
            )
        traffic = Traffic.read(rows, llm.codec, max_tokens=longest, seed=config.seed)
        others = Traffic.read(general, llm.codec, max_tokens=longest, seed=config.seed).without(traffic)
        learnt, self.held_out = traffic.split(config.held_out)
        learnt = learnt[: config.max_prompts]
        rehearsed, self.judged = others.halves()
        if not self.judged or (config.rehearsal > 0 and not rehearsed):
            raise ConfigError(
                f"general: expected at least two prompts that the data does not have, got {len(others.prompts)}; "
                "hint: other general prompts"
            )
        mixed = mix(learnt, rehearsed, config.rehearsal)
        self.facts = {
            "num_rows": traffic.num_rows,
            "num_repeated": traffic.num_repeated,
            "num_too_long": traffic.num_long,
            "num_learnt": len(learnt),
            "num_held_out": len(self.held_out),
            "num_rehearsed": len(mixed) - len(learnt),
            "num_different_rehearsed": min(len(rehearsed), len(mixed) - len(learnt)),
            "num_general": len(self.judged),
            "digest": digest(traffic.prompts),
        }
        self._restore(resume, digest([*mixed, *self.held_out, *self.judged]))
        _write_prompts(mixed, self.out / PROMPTS)
        return mixed

    def _restore(self, resume: bool, prompts: str) -> None:
        """Takes up the plan of the folder, or begins one there."""
        fixed = asdict(self.config) | {"drafter": sha256_of(self.old / WEIGHTS), "prompts": prompts}
        del fixed["out"]
        contract = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
        path = self.out / PLAN
        if path.exists():
            found: Plan = from_table(Plan, _read_json(path), str(path))
            if not resume:
                raise ConfigError(f"{self.out}: holds an earlier run; hint: another `out`, or resume it")
            if found.contract != contract:
                raise ConfigError(
                    f"{self.out}: belongs to other settings, data or another drafter; hint: another `out`"
                )
            self.plan = found
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            self._decide(contract=contract)

    def _decide(self, **changes: Any) -> None:
        """Stores what was decided. Mutates: plan and folder."""
        now = time.perf_counter()
        spent = self.plan.spent_s + now - self.started
        self.started = now
        self.plan = replace(self.plan, spent_s=spent, **changes)
        _write_json(self.out / PLAN, asdict(self.plan))

    @property
    def _left_s(self) -> float:
        """Seconds until all has to be done."""
        return 60 * self.config.minutes - self.plan.spent_s - (time.perf_counter() - self.started)

    # Measuring -------------------------------------------------------------------------------------------------------

    def _plan_measuring(self, llm: LLM) -> None:
        """Decides how many prompts are measured, from one of each set."""
        assert llm.neural is not None
        arms = arms_of(llm.target, llm.tree_nodes, llm.neural)
        pilot = [self.held_out[0], self.judged[0]]
        found = evaluate(arms, pilot, max_new_tokens=self.config.max_new_tokens)
        per_prompt_token, per_new_token = 0.0, 0.0
        for name, evaluation in found.items():
            weight = 1 if name == "plain" else 2  # before and after
            per_prompt_token += weight * evaluation.prefill_s / sum(len(p.token_ids) for p in pilot)
            per_new_token += weight / evaluation.tokens_per_s if evaluation.tokens_per_s else 0.0

        def cost(prompts: Sequence[Prompt]) -> float:
            tokens = sum(len(p.token_ids) for p in prompts)
            new = len(prompts) * self.config.max_new_tokens
            return len(self.config.temperatures) * (tokens * per_prompt_token + new * per_new_token)

        budget = 60 * self.config.minutes * MEASURING_SHARE / 2
        counts = [affordable(s, cost, budget) for s in (self.held_out, self.judged)]
        spent = cost(self.held_out[: counts[0]]) + cost(self.judged[: counts[1]])
        self._decide(num_held_out=counts[0], num_general=counts[1], measuring_s=spent)

    def _measure(self, llm: LLM, new: NeuralDrafter) -> list[dict[str, Any]]:
        """Returns a row for each set and temperature: what decoding takes."""
        assert llm.neural is not None
        arms = arms_of(llm.target, llm.tree_nodes, llm.neural, new)
        sets = {
            "held_out": self.held_out[: self.plan.num_held_out],
            "general": self.judged[: self.plan.num_general],
        }
        tell = self._counting("measuring", len(self.config.temperatures) * sum(map(len, sets.values())))
        rows = []
        for name, prompts in sets.items():
            for temperature in self.config.temperatures:
                found = evaluate(
                    arms,
                    prompts,
                    max_new_tokens=self.config.max_new_tokens,
                    temperature=temperature,
                    tell=tell,
                )
                rows += [{"set": name, "temperature": temperature, **row} for row in compare(found)]
        return rows

    def _counting(self, stage: str, total: int) -> Callable[[], None]:
        """Returns what is to be called behind each of `total` prompts; it raises where the run is asked to stop."""
        done = itertools.count(1)

        def tell() -> None:
            self.observe(AdaptEvent(stage, next(done), total))
            if self.should_stop():
                raise KeyboardInterrupt

        return tell

    # Foretelling -----------------------------------------------------------------------------------------------------

    def _plan_judging(self, llm: LLM) -> None:
        """Lets the target answer the prompts that judge, for as long as the plan has time. Mutates: plan, folder."""
        counts = {}
        for name, prompts in (("held_out", self.held_out), ("general", self.judged)):
            began, count, most = time.perf_counter(), 0, min(len(prompts), MAX_JUDGED)
            budget = 60 * self.config.minutes * JUDGING_SHARE / 2
            while count < most:
                count = min(count + JUDGED_PER_SHARD, most)
                self._judging(name, prompts[:count], llm)
                if (time.perf_counter() - began) * (1 + JUDGED_PER_SHARD / count) > budget:
                    break
            counts[f"judged_{name}"] = count
        self._decide(**counts)

    def _judging(self, name: str, prompts: Sequence[Prompt], llm: LLM) -> list[Document]:
        """Returns the target's answers to prompts that judge; those on disk are used."""
        made = self._recipe(len(prompts))
        settings = replace(
            made.regenerate,
            temperatures=self.config.temperatures[:1],
            num_sequences=JUDGED_PER_SHARD,
            prompts_per_shard=JUDGED_PER_SHARD,
        )

        def tell(done: int, total: int, _: int | None) -> None:
            self.observe(AdaptEvent("judging", done, total))
            if self.should_stop():
                raise KeyboardInterrupt

        layer_ids = self.checkpoint.config.target_layer_ids
        folder = self.out / "judging" / name
        return collect(prompts, llm.target, layer_ids, folder, replace(made, regenerate=settings), tell)

    def _foretell(self, llm: LLM, made: DrafterCheckpoint, new: NeuralDrafter) -> dict[str, Any]:
        """Returns what both drafters' chains are worth, by set."""
        assert llm.neural is not None
        heads = llm.target.heads
        before, after = (
            Chains(Scorer(heads.embed_weight, heads.head_weight, checkpoint.token_ids), drafter)
            for checkpoint, drafter in ((self.checkpoint, llm.neural), (made, new))
        )
        sets = {
            "held_out": self.held_out[: self.plan.judged_held_out],
            "general": self.judged[: self.plan.judged_general],
        }
        documents = {name: self._judging(name, prompts, llm) for name, prompts in sets.items()}
        tell = self._counting("foretelling", sum(map(len, sets.values())))
        return {
            name: compare_foretold(before, after, prompts, documents[name], tell)
            for name, prompts in sets.items()
        }

    # Training --------------------------------------------------------------------------------------------------------

    def _recipe(self, num_learnt: int) -> TrainConfig:
        return recipe(self.config, self.plan, self.old, self.checkpoint, num_learnt)

    def _train(self, mixed: Sequence[Prompt]) -> None:
        """Trains to the end of a plan that is made on the way. Mutates: plan and folder."""
        while True:
            watch = Watch(self.plan, 60 * self.config.minutes * ANSWERS_SHARE)

            def see(event: TrainEvent, watch: Watch = watch) -> None:
                watch.see(event)
                self._tell(event)

            def should_stop(watch: Watch = watch) -> bool:
                return self.should_stop() or watch.is_due

            try:
                result = train(
                    self._recipe(len(mixed)), observe=see, should_stop=should_stop, offline=self.offline
                )
            except KeyboardInterrupt:
                if not watch.is_cut:
                    raise
                self._decide(num_prompts=watch.num_shards * PROMPTS_PER_SHARD)
                continue
            if not watch.is_due and not result.finished:
                raise KeyboardInterrupt
            if self.plan.max_steps is not None:
                self._decide()
                return
            num_tokens = DrafterCheckpoint.load(result.folder).provenance["data"]["num_response_tokens"]
            self._decide(max_steps=watch.affordable_steps(self._left_s, num_tokens))

    def _tell(self, event: TrainEvent) -> None:
        if isinstance(event.detail, Progress):
            total = 0 if self.plan.max_steps is None else event.total
            self.observe(AdaptEvent("steps", event.done, total, event.detail))
        else:
            self.observe(AdaptEvent("answers", event.done, event.total))

    # Judging ---------------------------------------------------------------------------------------------------------

    def _judge(self) -> Adaptation:
        llm = self._open()
        made = DrafterCheckpoint.load(self.out / "training" / "drafter")
        new = llm.bind(made)
        foretold = self._foretell(llm, made, new)
        rows = self._measure(llm, new)
        self._decide()
        adopted, reason = verdict(foretold)
        report: dict[str, Any] = {
            "adopted": adopted,
            "reason": reason,
            "rule": RULE,
            "target": llm.target.spec.name,
            "drafter": {"from": self.config.drafter, "sha256": sha256_of(self.old / WEIGHTS)},
            "data": self.facts,
            "settings": {
                **{k: v for k, v in asdict(self.config).items() if k != "out"},
                "temperatures": list(self.config.temperatures),
            },
            "plan": {k: v for k, v in asdict(self.plan).items() if k != "contract"},
            "dtype": str(llm.dtype).removeprefix("torch."),
            "foretold": foretold,
            "measured": rows,
            "machine": machine(),
        }
        if adopted:
            kept = {k: report[k] for k in ("drafter", "data", "rule", "foretold", "measured")}
            replace(made, provenance={**made.provenance, "adapted": kept}).save(self.out / "drafter")
        _write_json(self.out / REPORT, report)
        return self._result(report)

    def _result(self, report: dict[str, Any]) -> Adaptation:
        folder = self.out / "drafter" if report["adopted"] else None
        return Adaptation(report["adopted"], folder, report)


def _drafter_folder(config: AdaptConfig) -> Path:
    if config.drafter != "auto":
        return Path(config.drafter).expanduser()
    folder = shipped_drafter(config.target)
    if folder is None:
        raise ConfigError(
            f"drafter: none ships for {config.target!r}; hint: name a folder, or train one with paceline train"
        )
    return folder


def _write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    rows = ({"id": p.id, "category": p.category, "prompt_ids": p.token_ids} for p in prompts)
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write_json(path: Path, value: object) -> None:
    _write(path, json.dumps(value, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); hint: begin anew in another folder") from error
    return value
