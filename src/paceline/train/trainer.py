"""The training loop: step, evaluate, save, resume.

Every draw is keyed by step and every rate is a function of the step, so a run that is interrupted and resumed ends with
the same weights and the same curve as one that was not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.acceptance import accepted_prefix
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import DrafterConfig, NeuralConfig
from paceline.train.batch import BlockSampler, Cursor, DraftVocabulary, TrainBatch, draw_anchors, generator
from paceline.train.config import OptimConfig
from paceline.train.features import Document
from paceline.train.losses import BlockLoss, Weigh, block_loss, dpace_weights, exponential_weights
from paceline.train.optimizer import Muon, schedule

STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class CurveRow:
    """One evaluation on held-out documents.

    Args:
        step, num_blocks, seconds: how far training was; seconds of training only, over all resumed parts.
        train_loss: mean loss since the row before.
        held_out_loss: loss on the held-out blocks.
        acceptance_length: mean leading run of right slots plus one, greedy and teacher-forced.
        slot_accuracy: share of right tokens per slot.
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

    Attributes:
        token_ids: the tokens it learns to draft, `None` for all.
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
    ) -> None:
        check_fit(settings, drafter.config, len(documents))
        self.drafter, self.settings, self.folder, self.contract = drafter, settings, folder, contract
        kept_out = settings.held_out_documents
        vocab_size = drafter.config.vocab_size
        vocabulary = DraftVocabulary.covering(documents[kept_out:], vocab_size, settings.draft_vocab_size)
        self.token_ids = vocabulary.token_ids if settings.draft_vocab_size is not None else None
        self._head_weight, self._embed_weight = head_weight, embed_weight
        self._vocabulary = vocabulary
        self._sampler = self._new_sampler(documents[kept_out:])
        held_out = self._new_sampler(documents[:kept_out])
        self._held_out = _held_out_batches(held_out, settings, drafter.config.num_draft_tokens)
        self._weigh: Weigh = (
            dpace_weights(settings.dpace_alpha)
            if settings.loss == "dpace"
            else exponential_weights(settings.decay)
        )
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim < 2]
        lr, decay, rows = settings.lr, settings.weight_decay, settings.muon_block_rows
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr, weight_decay=decay, block_rows=rows),
            torch.optim.AdamW(vectors, lr, (0.9, 0.95), weight_decay=0),
        ]
        self.step, self.num_blocks, self.seconds = 0, 0, 0.0
        self.cursor, self.curve = Cursor(), list[CurveRow]()
        self._losses: list[float] = []

    def _new_sampler(self, documents: Sequence[Document]) -> BlockSampler:
        return BlockSampler(
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
        """Trains until `max_steps` or until asked to stop, and saves the state.

        Mutates: drafter, optimisers, curve, and the state on disk.
        """
        settings = self.settings
        if not self.curve:
            self._evaluate(0.0)
        while self.step < settings.max_steps and not should_stop():
            started = time.perf_counter()
            loss, num_blocks = self._train_step()
            elapsed = time.perf_counter() - started
            self.step, self.num_blocks, self.seconds = (
                self.step + 1,
                self.num_blocks + num_blocks,
                self.seconds + elapsed,
            )
            self._losses.append(loss)
            last = self.step == settings.max_steps
            row = (
                self._evaluate(sum(self._losses) / len(self._losses))
                if self._is_due("eval_every") or last
                else None
            )
            if self._is_due("save_every") and not last:
                self.save()
            observe(Progress(self.step, settings.max_steps, loss, num_blocks / elapsed, row))
        self.save()

    def _is_due(self, interval: str) -> bool:
        return bool(self.step % getattr(self.settings, interval) == 0)

    def _train_step(self) -> tuple[float, int]:
        settings = self.settings
        lr = self._lr()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        batch, self.cursor = self._sampler.next(self.cursor, self.step, self._num_slots() - 1)
        outcome = self._forward(batch)
        outcome.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.clip_norm)
        if not torch.isfinite(norm):
            raise PacelineError(
                f"gradient of step {self.step} is not finite; the state saved before it is whole; hint: lower train.lr"
            )
        for optimizer in self._optimizers:
            optimizer.step()
        self.drafter.zero_grad(set_to_none=True)
        return float(outcome.loss.detach()), batch.num_blocks

    def _forward(self, batch: TrainBatch) -> BlockLoss:
        hidden = self.drafter.forward_blocks(batch.documents, self._embed_weight, batch.labels.shape[1] + 1)
        head = self.drafter.head(self._head_weight, self._vocabulary.token_ids)
        return block_loss(hidden, head, batch.labels, self._weigh, chunk_blocks=self.settings.chunk_blocks)

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

    @torch.no_grad()
    def _evaluate(self, train_loss: float) -> CurveRow:
        outcomes = [self._forward(batch) for batch in self._held_out]
        correct = torch.cat([o.correct for o in outcomes])
        supervised = torch.cat([o.supervised for o in outcomes])
        accuracy = correct.sum(0) / supervised.sum(0).clamp(min=1)
        row = CurveRow(
            step=self.step,
            num_blocks=self.num_blocks,
            seconds=self.seconds,
            train_loss=train_loss,
            held_out_loss=float(torch.stack([o.loss for o in outcomes]).mean()),
            acceptance_length=1 + float(accepted_prefix(correct).double().mean()),
            slot_accuracy=tuple(accuracy.tolist()),
            lr=self._lr(),
        )
        self.curve.append(row)
        self._losses.clear()
        return row

    # Disk ------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the whole state atomically; an interrupted or failed write leaves the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "contract": self.contract,
            "drafter": self.drafter.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "step": self.step,
            "num_blocks": self.num_blocks,
            "seconds": self.seconds,
            "cursor": [self.cursor.epoch, self.cursor.index],
            "num_documents": len(self._sampler.documents),
            "losses": self._losses,
            "curve": [asdict(row) for row in self.curve],
        }
        path = self.folder / STATE
        partial = path.with_suffix(".partial")
        try:
            _write_state(state, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def resume(self) -> bool:
        """Loads the state of an earlier run and returns whether there was one.

        Raises:
            CheckpointError: the state is truncated.
            ConfigError: it belongs to another recipe, or to more documents.
        """
        path = self.folder / STATE
        if not path.exists():
            return False
        try:  # on the CPU first: the run may go on with another device
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path}: not a whole training state ({error}); hint: delete it to begin anew"
            ) from error
        if state["contract"] != self.contract:
            raise ConfigError(
                f"{path}: belongs to another recipe; hint: another `out`, or delete it to begin anew"
            )
        if state["num_documents"] > len(self._sampler.documents):
            raise ConfigError(
                f"{path}: trained on {state['num_documents']} documents, given {len(self._sampler.documents)}; "
                "hint: the same data.max_prompts or more"
            )
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.num_blocks, self.seconds = state["step"], state["num_blocks"], state["seconds"]
        self.cursor, self._losses = Cursor(*state["cursor"]), state["losses"]
        self.curve = [
            CurveRow(**{**row, "slot_accuracy": tuple(row["slot_accuracy"])}) for row in state["curve"]
        ]
        return True


def _write_state(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # how PyTorch reports a full disk
        raise OSError(f"{path}: could not be written ({error})") from error


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


def _held_out_batches(sampler: BlockSampler, settings: OptimConfig, num_drafts: int) -> list[TrainBatch]:
    """Returns every document once, at anchors that no evaluation changes."""
    rng = generator(settings.seed, 2)
    chosen = [(d, draw_anchors(d, settings.anchors_per_document, rng)) for d in sampler.documents]
    size = max(1, settings.blocks_per_step // settings.anchors_per_document)
    return [sampler.assemble(chosen[i : i + size], num_drafts) for i in range(0, len(chosen), size)]
