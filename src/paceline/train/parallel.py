"""Several processes that train one drafter, each on its share of every batch.

All of them hold the same weights: each draws the batch that one process would draw, takes its documents of it, and sums
of losses, weights and gradients are made equal before anybody uses them. `torchrun --nproc-per-node N` starts them.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.train.data.batch import BlockSampler, TrainBatch
from paceline.train.data.features import Document

T = TypeVar("T")
PATIENCE = timedelta(days=30)
"""How long processes wait for each other: answers may take the first days; `torchrun` ends all when one ends."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together; alone by default.

    Args:
        rank: 0 … world_size - 1; rank 0 writes.
        world_size: how many they are.
    """

    rank: int = 0
    world_size: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Returns the place that `torchrun` gave this process, after meeting the others; alone without `torchrun`.

        Mutates: the process, which gets a group (gloo for CPU tensors, NCCL for CUDA) and its own accelerator.
        """
        if not (dist.is_available() and dist.is_torchelastic_launched()):
            return cls()
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(dist.get_node_local_rank())
        dist.init_process_group(timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns every `world_size`-th item; a process may get none."""
        return items[self.rank :: self.world_size]

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by its sum over all processes, in one exchange. Mutates: tensors."""
        if self.world_size == 1 or not tensors:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def share_first_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by the first process's. Mutates: tensors."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sums gradients; what no process has a gradient for keeps none. Mutates: the gradients."""
        if self.world_size == 1 or not parameters:
            return
        holders = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device).int()
        self.sum_([holders])
        held = [p for p, count in zip(parameters, holders.tolist(), strict=True) if count]
        for parameter in held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum_([p.grad for p in held if p.grad is not None])

    def any(self, flag: bool, like: torch.Tensor) -> bool:
        """Returns whether any process says so; `like` is on the device where they meet."""
        count = torch.tensor([int(flag)], device=like.device)
        self.sum_([count])
        return bool(count.item())

    def require_same(self, what: dict[str, object]) -> None:
        """Raises `PacelineError` in every process where they do not all say the same."""
        if self.world_size == 1:
            return
        found: list[dict[str, object]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(found, what)
        for name in what:
            values = [each[name] for each in found]
            if any(value != values[0] for value in values):
                raise PacelineError(
                    f"processes of one run differ in {name}: {values}; hint: give all the same recipe, files and `out`"
                )


class RankSampler(BlockSampler):
    """Draws what one process would draw, and assembles this process's documents of it; its batches may be empty.

    Attributes:
        drawn: the documents of all processes in the last batch.
    """

    def __init__(self, ranks: Ranks, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ranks = ranks
        self.drawn: list[Document] = []

    def assemble(self, chosen: Sequence[tuple[Document, torch.Tensor]], num_drafts: int) -> TrainBatch:
        """Returns this process's share of the batch of given anchors."""
        self.drawn = [document for document, _ in chosen]
        return super().assemble(self._ranks.share(chosen), num_drafts)


def micro_batches(batch: TrainBatch, count: int) -> list[TrainBatch]:
    """Returns the batch in `count` parts of about as many documents each; without the empty ones. Pure."""
    num_blocks = [len(d.anchors) for d in batch.documents]
    bounds = [len(num_blocks) * i // count for i in range(count + 1)]
    parts = []
    for first, last in pairwise(bounds):
        if first == last:
            continue
        rows = slice(sum(num_blocks[:first]), sum(num_blocks[:last]))
        soft = batch.soft and batch.soft.part(rows)
        parts.append(
            replace(batch, documents=batch.documents[first:last], labels=batch.labels[rows], soft=soft)
        )
    return parts
