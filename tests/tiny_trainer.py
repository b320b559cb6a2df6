"""Tiny runs of the trainer, made alike in this process and in others.

As a program, `tiny_trainer.py FOLDER ACCUMULATION THREADS` makes or resumes a run and says each step, until it is
killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import SLIDING, DrafterConfig, Eagle3Config
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import DFlash2
from paceline.drafter.eagle3 import Eagle3
from paceline.train.config import OptimConfig
from paceline.train.data.features import Document
from paceline.train.parallel import Ranks
from paceline.train.trainer import STATE, Progress, Trainer

VOCAB, WIDTH = 40, 32
SETTINGS = OptimConfig(
    max_steps=6,
    blocks_per_step=15,
    anchors_per_document=6,
    slots=(2, 3, 4),
    lr=3e-3,
    warmup_steps=2,
    decay_steps=2,
    muon_block_rows=16,
    draft_vocab_size=30,
    chunk_blocks=7,
    held_out_documents=2,
    eval_every=2,
    save_every=3,
)


def make_documents(count: int, seed: int = 0) -> list[Document]:
    """Returns random documents of 14 to 20 tokens, the first 3 or 4 of them a prompt."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(0, VOCAB - 1, (14 + 3 * i % 7,), generator=rng)
        hidden = torch.randn(len(ids), 2 * WIDTH, generator=rng).bfloat16()
        made.append(Document(ids, torch.arange(len(ids)) >= 3 + i % 2, hidden))
    return made


def with_distributions(documents: Sequence[Document], num_top: int = 5) -> list[Document]:
    """Returns the documents with what their target said of each token: the token itself and others."""
    rng = torch.Generator().manual_seed(3)
    made = []
    for document in documents:
        logits = torch.randn(len(document.token_ids), VOCAB, generator=rng)
        logits.scatter_add_(1, document.token_ids[:, None], torch.full((len(logits), 1), 3.0))
        top = logits.log_softmax(dim=-1).topk(num_top, dim=-1)
        made.append(replace(document, top_ids=top.indices.int(), top_log_probs=top.values.half()))
    return made


def make_config(kind: str = SLIDING, **changes: Any) -> DrafterConfig:
    """Returns the shape of a drafter of two layers for blocks of four slots."""
    config = DrafterConfig(
        block_size=4,
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=VOCAB,
        target_layer_ids=(0, 2),
        num_target_layers=3,
        mask_token_id=VOCAB - 1,
        layer_types=(kind, kind),
        sliding_window=64 if kind == SLIDING else None,
    )
    return replace(config, **changes)


def make_drafter(kind: str = SLIDING) -> DFlash:
    """Returns a drafter, always the same."""
    torch.manual_seed(0)
    return DFlash(make_config(kind))


def make_dflash2() -> DFlash2:
    """Returns a DFlash 2 drafter, always the same."""
    torch.manual_seed(0)
    config = make_config(variant="dflash2", conv_group_size=8, selector_rank=8, selector_top_k=5)
    return DFlash2(config)


def make_eagle3() -> Eagle3:
    """Returns an EAGLE-3 drafter of 30 tokens, always the same."""
    torch.manual_seed(0)
    return Eagle3(Eagle3Config(4, WIDTH, 4, 2, 8, 48, VOCAB, 30, (0, 2), 3))


def make_trainer(
    folder: Path,
    settings: OptimConfig = SETTINGS,
    documents: Sequence[Document] | None = None,
    *,
    drafter: NeuralDrafter | None = None,
    contract: str = "one recipe",
    ranks: Ranks | None = None,
) -> Trainer:
    """Returns a trainer of a fresh drafter, in the settings' dtype."""
    dtype = getattr(torch, settings.dtype)
    rng = torch.Generator().manual_seed(1)
    embed, head = torch.randn(2, VOCAB, WIDTH, generator=rng).to(dtype)
    chosen = make_documents(9) if documents is None else documents
    drafter = (drafter or make_drafter()).to(dtype)
    return Trainer(drafter, embed, head, chosen, settings, folder, contract, ranks or Ranks())


def stopping_at(step: int) -> tuple[Callable[[Progress], None], Callable[[], bool]]:
    """Returns an observer and a question that together end a run behind its `step`-th step."""
    seen = [0]

    def observe(progress: Progress) -> None:
        seen[0] = progress.step

    return observe, lambda: seen[0] >= step


def outcome(folder: Path) -> dict[str, Any]:
    """Returns everything of a saved state but the times."""
    state: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
    del state["seconds"]
    for row in state["curve"]:
        del row["seconds"]
    return state


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Compares nested states bit by bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert left == right, where


def long_trainer(folder: Path, accumulation_steps: int) -> Trainer:
    """Returns a trainer of 24 steps that often saves."""
    settings = replace(
        SETTINGS, max_steps=24, save_every=3, eval_every=7, accumulation_steps=accumulation_steps
    )
    return make_trainer(folder, settings)


def say_steps(folder: Path, accumulation_steps: int) -> None:
    """Runs `long_trainer` from where it was, and writes a line for each step."""
    trainer = long_trainer(folder, accumulation_steps)
    trainer.resume()

    def say(progress: Progress) -> None:
        sys.stdout.write(f"{progress.step}\n")
        sys.stdout.flush()

    trainer.run(say)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    say_steps(Path(sys.argv[1]), int(sys.argv[2]))
