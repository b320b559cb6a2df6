"""Passes of fixed shapes, which a device can record once and replay.

What a pass computes is a function of tensors alone, so it may be run as it is, or recorded over tensors that stay where
they are, and replayed over other contents. A recording has one shape, so whoever has more or fewer rows is padded to a
bucket: sizes double from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

import torch

Tensors = tuple[torch.Tensor, ...]

MAX_SEQUENCES, MAX_WIDTH = 32, 64
"""Passes of more sequences, or of more rows for one of them, are busy enough: they run as they are."""
MIN_LENGTH = 512
"""Shortest K/V length of a bucket; a whole block of a CPU's kernels, so that sums split as they do unrecorded."""


class Recorder(Protocol):
    """Runs passes, recorded where that pays."""

    def run(self, owner: object, key: Hashable, inputs: Tensors, function: Callable[..., Tensors]) -> Tensors:
        """Returns what `function` makes of `inputs`; the tensors are overwritten by the next run of any pass.

        Args:
            owner: whose pass it is.
            key: what else the pass depends on: its shapes, and every host value that `function` reads.
            inputs: host tensors; copied.
            function: device tensors ↦ device tensors, repeatable: it may be run several times over the same inputs,
                and a replay runs it as it was at the first call.
        """

    def forget(self, owner: object) -> None:
        """Drops the passes of an owner whose other tensors have moved. Mutates: self."""


@runtime_checkable
class Recordable(Protocol):
    """What has passes to record."""

    def record(self, recorder: Recorder | None) -> None:
        """Lets `recorder` run its passes; `None` runs them as they are. Mutates: self."""


def bucket(size: int) -> int:
    """Returns the least power of two that is at least `size` (1 or more). Pure."""
    return 1 << (size - 1).bit_length()


def window(slots: Sequence[int]) -> tuple[int, int]:
    """Returns the first slot and the number of slots of the least aligned power of two that holds all. Pure.

    Slots are handed out from the lowest, and there is a power of two of them, so a window is mostly full and never
    reaches beyond the last.
    """
    size = 1 << (min(slots) ^ max(slots)).bit_length()
    return min(slots) // size * size, size


def length_bucket(length: int, room: int) -> int:
    """Returns the K/V length of the bucket for `length` tokens in slots of `room`. Pure."""
    return min(max(MIN_LENGTH, bucket(length)), room)


def upload(values: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a host tensor's values on a device without waiting for what the device still does.

    Args:
        into: where to write them; `None` takes new memory, on a CPU the very tensor. Mutates: it.
    """
    if device.type == "cpu":
        return values if into is None else into.copy_(values)
    there = torch.empty_like(values, device=device) if into is None else into
    return there.copy_(values.pin_memory(), non_blocking=True)
