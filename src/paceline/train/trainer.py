"""The training loop: step, evaluate, save, resume.

Every draw is keyed by step and every rate is a function of the step, so a run that is interrupted and resumed ends with
the same weights, the same losses and the same curve as one that was not. Several processes may share each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline.core.acceptance import accepted_prefix
from paceline.core.errors import ConfigError, PacelineError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import DrafterConfig, NeuralConfig
from paceline.train.config import OptimConfig
from paceline.train.data.batch import Cursor, DraftVocabulary, TrainBatch, draw_anchors, generator
from paceline.train.data.features import Document
from paceline.train.losses import IGNORED
from paceline.train.objective import Objective
from paceline.train.optimizer import Muon, schedule, split_parameters
from paceline.train.parallel import Ranks, RankSampler, micro_batches
from paceline.train.state import read_state, write_state

STATE = "state.pt"
ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class CurveRow:
    """One evaluation on held-out documents.

    Args:
        step, num_blocks, seconds: how far training was; seconds of training only, over all resumed parts.
        train_loss: mean loss since the row before.
        held_out_loss: loss on the held-out blocks.
        acceptance_length: mean leading run of right slots plus one, greedy and teacher-forced.
        slot_accuracy: share of right tokens per slot; with a selector, of right choices behind the true token before.
        lr: learning rate at that step.
    """

    step: int
    num_blocks: int
    seconds: float
    train_loss: float
    held_out_loss: float
    acceptance_length: float
    slot_accuracy: tuple[float, ...]
    lr: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What an observer is told after each step; `row` is set when that step was evaluated."""

    step: int
    max_steps: int
    loss: float
    blocks_per_s: float
    row: CurveRow | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The evaluation with the longest acceptance so far, the earliest of equals, and the weights that it judged.

    Args:
        row: of the curve.
        weights: state dict of the drafter, on the CPU.
    """

    row: CurveRow
    weights: dict[str, torch.Tensor]


class Trainer:
    """Trains a drafter on documents.

    Args:
        drafter: trained in place; its dtype is the dtype of arithmetic and must be float32 or wider, since it is
            also the master copy.
        embed_weight, head_weight: (V, D) the target's frozen embedding and head.
        documents: training documents; the first `held_out_documents` are kept out, so that a resumed run may be
            given more of them.
        settings: see `OptimConfig`.
        folder: where the state is kept.
        contract: digest that a resumed run must share.
        ranks: the processes that train together; each is given the same.

    Attributes:
        token_ids: the tokens it learns to draft, `None` for all.
        losses: the loss of every step.
        best: what to keep of the run; `None` before the first evaluation. Steps behind it that did not help are lost,
            the drafter as it came (step 0) is one of those to choose from.
    """

    def __init__(
        self,
        drafter: NeuralDrafter,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        documents: Sequence[Document],
        settings: OptimConfig,
        folder: Path,
        contract: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        check_fit(settings, drafter.config, len(documents))
        self.drafter, self.settings, self.folder, self.contract = drafter, settings, folder, contract
        self.ranks, self._documents = ranks, documents
        self._head_weight, self._embed_weight = head_weight, embed_weight
        trained_on = documents[settings.held_out_documents :]
        vocab_size = drafter.config.vocab_size
        size, learned = settings.draft_vocab_size, drafter.learned_ids
        self._use(DraftVocabulary.covering(trained_on, vocab_size, size, learned))
        drafter.start(head_weight, self._vocabulary.token_ids)
        if settings.parts == "selector":
            for name, parameter in drafter.named_parameters():
                parameter.requires_grad_(name.startswith("candidate_selector."))
        matrices, others = split_parameters(drafter)
        self._parameters = [*matrices, *others]
        lr, decay, rows = settings.lr, settings.weight_decay, settings.muon_block_rows
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr, weight_decay=decay, block_rows=rows),
            torch.optim.AdamW(others, lr, (0.9, 0.95), weight_decay=0),
        ]
        self.step, self.num_blocks, self.seconds = 0, 0, 0.0
        self.cursor, self.curve, self.losses = Cursor(), list[CurveRow](), list[float]()
        self.best: Best | None = None

    def _use(self, vocabulary: DraftVocabulary) -> None:
        """Sets which tokens are scored. Mutates: the samplers, the held-out batches and the objective."""
        settings, kept_out = self.settings, self.settings.held_out_documents
        self._vocabulary = vocabulary
        self.token_ids = vocabulary.token_ids if settings.draft_vocab_size is not None else None
        self._sampler = self._new_sampler(self._documents[kept_out:])
        held_out = self._new_sampler(self._documents[:kept_out])
        self._held_out = _held_out_batches(held_out, settings, self.drafter.config.num_draft_tokens)
        self._objective = Objective(
            self.drafter, self._embed_weight, self._head_weight, vocabulary.token_ids, settings
        )

    def _new_sampler(self, documents: Sequence[Document]) -> RankSampler:
        return RankSampler(
            self.ranks,
            documents,
            self._embed_weight,
            self._vocabulary,
            blocks_per_step=self.settings.blocks_per_step,
            anchors_per_document=self.settings.anchors_per_document,
            seed=self.settings.seed,
        )

    # The loop --------------------------------------------------------------------------------------------------------

    def run(
        self,
        observe: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains until `max_steps`, until patience is exhausted or until asked to stop, and saves the state.

        Mutates: drafter, optimisers, curve, and the state on disk.

        Args:
            observe: told after every step.
            should_stop: asked before every step; one process that says so stops all.

        Raises:
            PacelineError: a loss or gradient that is not finite; drafter and the state on disk are what they were
                before that step.
            OSError: the state could not be written; the one before stays.
        """
        settings = self.settings
        self.ranks.require_same(
            {"recipe": self.contract, "step": self.step, "documents": len(self._documents)}
        )
        self.ranks.share_first_(list(self.drafter.state_dict().values()))
        if not self.curve:
            self._evaluate()
        while (
            self.step < settings.max_steps
            and not self.is_exhausted
            and not self.ranks.any(should_stop(), self._embed_weight)
        ):
            started = time.perf_counter()
            loss, num_blocks = self._train_step()
            elapsed = time.perf_counter() - started
            self.step, self.num_blocks, self.seconds = (
                self.step + 1,
                self.num_blocks + num_blocks,
                self.seconds + elapsed,
            )
            self.losses.append(loss)
            last = self.step == settings.max_steps
            row = self._evaluate() if self._is_due("eval_every") or last else None
            if self._is_due("save_every") and not last:
                self.save()
            observe(Progress(self.step, settings.max_steps, loss, num_blocks / elapsed, row))
        self.save()

    @property
    def is_exhausted(self) -> bool:
        """Whether the last `patience` evaluations brought no better acceptance length, so that training ends early."""
        if self.settings.patience is None or self.best is None:
            return False
        return sum(row.step > self.best.row.step for row in self.curve) >= self.settings.patience

    def _is_due(self, interval: str) -> bool:
        return bool(self.step % getattr(self.settings, interval) == 0)

    def _train_step(self) -> tuple[float, int]:
        lr, begin = self._lr(), self.cursor
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        batch, self.cursor = self._sampler.next(begin, self.step, self._num_slots() - 1)
        sums = torch.zeros(3, dtype=torch.float64, device=self._embed_weight.device)
        for part in micro_batches(batch, self.settings.accumulation_steps):
            outcome = self._objective(part)
            outcome.total.backward()
            sums += _stack(outcome.total, outcome.weight, part.num_blocks)
        self.ranks.sum_([sums])
        self.ranks.sum_gradients(self._parameters)
        total, weight, num_blocks = sums.tolist()
        loss = total / max(weight, 1e-12)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= max(weight, 1e-12)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm)
        self._require_finite(loss, float(norm), begin.epoch)
        for optimizer in self._optimizers:
            optimizer.step()
        self.drafter.zero_grad(set_to_none=True)
        return loss, int(num_blocks)

    def _require_finite(self, loss: float, norm: float, epoch: int) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        numbers = {id(document): i for i, document in enumerate(self._sampler.documents)}
        raise PacelineError(
            f"{'gradient' if math.isfinite(loss) else 'loss'} of step {self.step} is not finite (epoch {epoch}, "
            f"documents {[numbers[id(d)] for d in self._sampler.drawn]} of those trained on, counted from 0); weights "
            "and saved state are those before it; hint: look at these documents' hidden states, or lower train.lr"
        )

    def _lr(self) -> float:
        s = self.settings
        factor = schedule(
            self.step, max_steps=s.max_steps, warmup_steps=s.warmup_steps, decay_steps=s.decay_steps
        )
        return s.lr * factor

    def _num_slots(self) -> int:
        choices = self.settings.slots or (self.drafter.config.block_size,)
        return choices[
            int(torch.randint(len(choices), (1,), generator=generator(self.settings.seed, 1, self.step)))
        ]

    def _evaluate(self) -> CurveRow:
        """Returns the row of this step. Mutates: curve and best."""
        recent = self.losses[self.curve[-1].step if self.curve else 0 :]
        loss, acceptance_length, accuracy = self._measure()
        row = CurveRow(
            step=self.step,
            num_blocks=self.num_blocks,
            seconds=self.seconds,
            train_loss=sum(recent) / max(1, len(recent)),
            held_out_loss=loss,
            acceptance_length=acceptance_length,
            slot_accuracy=accuracy,
            lr=self._lr(),
        )
        self.curve.append(row)
        if self.best is None or row.acceptance_length > self.best.row.acceptance_length:
            self.best = Best(row, _copy(self.drafter.state_dict()))
        return row

    @torch.no_grad()
    def _measure(self) -> tuple[float, float, tuple[float, ...]]:
        """Returns loss, acceptance length and accuracy per slot over the held-out documents of all processes."""
        num_slots = self.drafter.config.num_draft_tokens
        sums = torch.zeros(4 + 2 * num_slots, dtype=torch.float64, device=self._embed_weight.device)
        for batch in self._held_out:
            outcome = self._objective(batch)
            accepted = accepted_prefix(outcome.correct).sum()
            per_slot = torch.cat([outcome.correct.sum(0), outcome.supervised.sum(0)])
            sums += torch.cat([_stack(outcome.total, outcome.weight, batch.num_blocks, accepted), per_slot])
        self.ranks.sum_([sums])
        total, weight, num_blocks, accepted_sum = sums[:4].tolist()
        if not math.isfinite(total):
            raise PacelineError(
                f"held-out loss at step {self.step} is not finite; the state saved before is whole; hint: look at the "
                "held-out documents' hidden states, or lower train.lr"
            )
        correct, supervised = sums[4:].split(num_slots)
        accuracy = tuple((correct / supervised.clamp(min=1)).tolist())
        return total / max(weight, 1e-12), 1 + accepted_sum / num_blocks, accuracy

    # Disk ------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the whole state atomically, in the first of several processes."""
        if not all(bool(p.isfinite().all()) for p in self._parameters):
            raise PacelineError(
                f"weights at step {self.step} are not finite; the state saved before is whole; hint: lower train.lr"
            )
        if not self.ranks.is_first:
            return
        state = {
            "contract": self.contract,
            "drafter": self.drafter.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "token_ids": self._vocabulary.token_ids,
            "step": self.step,
            "num_blocks": self.num_blocks,
            "seconds": self.seconds,
            "cursor": [self.cursor.epoch, self.cursor.index],
            "num_documents": len(self._sampler.documents),
            "losses": self.losses,
            "curve": [asdict(row) for row in self.curve],
            "best_step": self.best and self.best.row.step,
            "best_weights": self.best and self.best.weights,
        }
        write_state(state, self.folder / STATE)

    def resume(self) -> bool:
        """Loads the state of an earlier run and returns whether there was one.

        Steps that came after its last save are made again, and come out the same. The run may go on with another
        number of processes; then they come out the same but for rounding.

        Raises:
            CheckpointError: the state is truncated.
            ConfigError: it belongs to another recipe, or to more documents.
        """
        path = self.folder / STATE
        state = read_state(path)
        if state is None:
            return False
        if state["contract"] != self.contract:
            raise ConfigError(
                f"{path}: belongs to another recipe; hint: another `out`, or delete it to begin anew"
            )
        if state["num_documents"] > len(self._sampler.documents):
            raise ConfigError(
                f"{path}: trained on {state['num_documents']} documents, given {len(self._sampler.documents)}; "
                "hint: the same data.max_prompts or more"
            )
        if not torch.equal(
            state["token_ids"], self._vocabulary.token_ids
        ):  # more documents have other common tokens
            self._use(_vocabulary_of(state["token_ids"], self.drafter.config.vocab_size))
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.num_blocks, self.seconds = state["step"], state["num_blocks"], state["seconds"]
        self.cursor, self.losses = Cursor(*state["cursor"]), state["losses"]
        self.curve = [
            CurveRow(**{**row, "slot_accuracy": tuple(row["slot_accuracy"])}) for row in state["curve"]
        ]
        best = [row for row in self.curve if row.step == state["best_step"]]
        self.best = Best(best[0], state["best_weights"]) if best else None
        return True


def _stack(*values: torch.Tensor | float) -> torch.Tensor:
    """Returns scalars as one float64 tensor, without gradient and without waiting for the device."""
    device = next(v.device for v in values if isinstance(v, torch.Tensor))
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values])


def _copy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def _vocabulary_of(token_ids: torch.Tensor, vocab_size: int) -> DraftVocabulary:
    index = torch.full((vocab_size,), IGNORED)
    index[token_ids] = torch.arange(len(token_ids))
    return DraftVocabulary(token_ids, index)


def check_fit(settings: OptimConfig, config: NeuralConfig, num_documents: int) -> None:
    """Raises `ConfigError` where settings fit neither the drafter nor the number of documents."""
    if num_documents <= settings.held_out_documents:
        raise ConfigError(
            f"{num_documents} documents leave none to train on after {settings.held_out_documents} held out; "
            "hint: more prompts, or a smaller train.held_out_documents"
        )
    slots, size = settings.slots, config.block_size
    if any(not 2 <= s <= size for s in slots):
        raise ConfigError(f"train.slots: expected 2…{size} (the block size), got {list(slots)}")
    is_causal = not isinstance(config, DrafterConfig) or all(rule.causal for rule in config.layer_rules)
    if any(s < size for s in slots) and not is_causal:
        raise ConfigError(
            f"train.slots: expected [{size}] (the block size), got {list(slots)}; shorter blocks are the same "
            "function only where every layer is causal; hint: drafter.layer_types = ['sliding_attention']"
        )


def _held_out_batches(sampler: RankSampler, settings: OptimConfig, num_drafts: int) -> list[TrainBatch]:
    """Returns this process's share of the documents, each once, at anchors that no evaluation changes."""
    rng = generator(settings.seed, 2)
    chosen = [(d, draw_anchors(d, settings.anchors_per_document, rng)) for d in sampler.documents]
    size = max(1, settings.blocks_per_step // settings.anchors_per_document)
    batches = [sampler.assemble(chosen[i : i + size], num_drafts) for i in range(0, len(chosen), size)]
    return [batch for batch in batches if batch.documents]
