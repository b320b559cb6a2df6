"""Training speed and memory for the default target's shape.

    python benchmarks/train_speed.py [--steps 12] [--out benchmarks/results/train_speed.json]

Two layers, block 8, a head of 12,288 tokens, taps cached in memory: blocks per second of whole optimiser steps (batch,
forward, backward, update) after two warm-up steps, and the peak of resident memory. Documents are random numbers of
the real shapes, since speed does not depend on what they say.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from paceline.drafter.config import SLIDING, DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.engine.runtime import machine
from paceline.train.config import OptimConfig
from paceline.train.data.features import Document
from paceline.train.trainer import Progress, Trainer

VOCAB, HIDDEN, TAPS, HEAD = 49152, 576, (1, 8, 14, 20, 27), 12288


def documents(count: int, num_prompt_tokens: int = 100, num_new_tokens: int = 130) -> list[Document]:
    """Returns documents of random tokens and hidden states in bfloat16."""
    rng = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, HEAD, (num_prompt_tokens + num_new_tokens,), generator=rng)
        hidden = torch.randn(len(ids), HIDDEN * len(TAPS), generator=rng).bfloat16()
        made.append(Document(ids, torch.arange(len(ids)) >= num_prompt_tokens, hidden))
    return made


def drafter() -> DFlash:
    """Returns an untrained drafter of the measured shape."""
    torch.manual_seed(0)
    return DFlash(
        DrafterConfig(
            block_size=8,
            hidden_size=HIDDEN,
            num_layers=2,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=VOCAB,
            target_layer_ids=TAPS,
            num_target_layers=30,
            mask_token_id=16,
            layer_types=(SLIDING, SLIDING),
            sliding_window=2048,
            rope_theta=100_000.0,
            rms_norm_eps=1e-5,
        )
    )


def main() -> None:
    """Measures and stores the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--blocks-per-step", type=int, default=192)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_speed.json"))
    arguments = parser.parse_args()
    settings = OptimConfig(
        max_steps=arguments.steps + 2,
        blocks_per_step=arguments.blocks_per_step,
        anchors_per_document=48,
        muon_block_rows=64,
        draft_vocab_size=HEAD,
        held_out_documents=1,
        eval_every=1_000_000,
        save_every=1_000_000,
    )
    rates: list[float] = []
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.05

    def observe(progress: Progress) -> None:
        rates.append(progress.blocks_per_s)

    with tempfile.TemporaryDirectory() as folder:
        Trainer(drafter(), weight, weight, documents(64), settings, Path(folder)).run(observe)
    result = {
        "command": "python benchmarks/train_speed.py",
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "shape": "2 layers, block 8, head 12288, 5 cached taps",
        "blocks_per_step": arguments.blocks_per_step,
        "blocks_per_s": round(statistics.median(rates[2:]), 1),
        "blocks_per_s_quartiles": [round(q, 1) for q in statistics.quantiles(rates[2:], n=4)],
        "peak_resident_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
