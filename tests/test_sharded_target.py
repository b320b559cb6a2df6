"""A target spread over two processes reads the same hidden states as one in a single piece."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.errors import UnsupportedTargetError
from paceline.target.hf import HFTarget
from paceline.train.config import DataConfig, RegenerateConfig, ShapeConfig, TrainConfig
from paceline.train.data.documents import collect
from paceline.train.data.features import Document
from paceline.train.data.prefill import hidden_of
from paceline.train.data.prompts import Prompt

TAPS, WORLD_SIZE = (0, 2), 2
PROMPTS = [
    Prompt(
        f"p{i}",
        "",
        tuple((5 * i + 7 * j) % 61 for j in range(4 + 3 * i)),
        (False,) * 2 + (True,) * (2 + 3 * i),
    )
    for i in range(5)
]


def new_target() -> HFTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return HFTarget(LlamaForCausalLM(config).double(), name="tiny")


def documents_of(target: HFTarget, folder: Path, *, sharded: bool) -> Sequence[Document]:
    config = TrainConfig(
        drafter=ShapeConfig(mask_token_id=3),
        data=DataConfig(answers="given", allow_foreign=True, features="online", shard_target=sharded),
        regenerate=RegenerateConfig(prompts_per_shard=2),
    )
    return collect(PROMPTS, target, TAPS, folder, config)


def read_in_a_group(rank: int, folder: Path) -> None:
    """Runs in each process: reads other documents, and other numbers of them, than the other process does."""
    torch.set_num_threads(1)  # before any work: threads do not survive a fork
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=WORLD_SIZE)
    target = new_target()
    whole = sum(p.numel() for p in target._model.parameters())
    documents = documents_of(target, folder / "run", sharded=True)
    made: dict[int, torch.Tensor] = {}
    for shares in (([0, 2, 4], [1]), ([3], [])):
        mine = [documents[i] for i in shares[rank]]
        made |= dict(zip(shares[rank], hidden_of(mine, documents[0]), strict=True))
    parts = sum(p.to_local().numel() for p in target._model.parameters())
    heads = target.heads
    found = {"hidden": made, "share": parts / whole, "embed": heads.embed_weight, "head": heads.head_weight}
    torch.save({**found, "row": heads.embed(torch.tensor([5]))}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # forked, since each process would else spend seconds on the same imports
    start_processes(read_in_a_group, (folder,), WORLD_SIZE, start_method="fork")
    return folder


def test_hidden_states_are_those_of_the_whole_target(folder: Path, tmp_path: Path) -> None:
    documents = documents_of(new_target(), tmp_path, sharded=False)
    seen: set[int] = set()
    for rank in range(WORLD_SIZE):
        for index, hidden in torch.load(folder / f"{rank}.pt")["hidden"].items():
            assert torch.equal(hidden, documents[index].hidden)
            assert hidden[:-1].abs().min() > 0
            seen.add(index)
    assert seen == set(range(5))


def test_each_process_holds_its_share_and_hands_out_whole_heads(folder: Path) -> None:
    heads = new_target().heads
    for rank in range(WORLD_SIZE):
        found = torch.load(folder / f"{rank}.pt")
        assert 0.4 < found["share"] < 0.6
        assert torch.equal(found["embed"], heads.embed_weight)
        assert torch.equal(found["head"], heads.head_weight)
        assert torch.equal(found["row"], heads.embed_weight[5:6])


def test_processes_share_the_shards(folder: Path) -> None:
    assert len(list((folder / "run").glob("answers-*.safetensors"))) == 3


def test_without_a_group_there_is_nothing_to_spread_over(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedTargetError, match="expected a group of processes, found none; hint: start"
    ):
        documents_of(new_target(), tmp_path, sharded=True)
