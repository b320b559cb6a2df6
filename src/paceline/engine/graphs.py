"""Recorded passes: the first pass of a bucket is recorded over buffers that stay, and later ones are replayed.

A step of a small batch is a few hundred kernels, each shorter than it takes a host to launch it; a replay launches all
of them at once. What can be recorded is what a target or drafter pads to a bucket (`core/recorder.py`); the rest of a
step runs as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.core.recorder import Tensors, upload

MAX_PASSES = 64
"""Recorded passes kept; each holds its outputs, a few MB."""


class Capture(Protocol):
    """How a device records."""

    @property
    def device(self) -> torch.device:
        """Where the passes run."""

    def record(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Returns what runs `function` again over the tensors that it has seen, and returns what it returned.

        May run it any number of times, none included.
        """


@dataclass(frozen=True, slots=True)
class Eager:
    """Records nothing: a replay calls the function. As with a graph, its outputs lie always in the same place."""

    device: torch.device

    def record(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Returns the function, over outputs that stay."""
        outputs = tuple(tensor.clone() for tensor in function())

        def replay() -> Tensors:
            for output, tensor in zip(outputs, function(), strict=True):
                output.copy_(tensor)
            return outputs

        return replay


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded pass and the buffers that it reads."""

    buffers: Tensors
    replay: Callable[[], Tensors]


class Graphs:
    """A `Recorder` that keeps recordings by bucket.

    Args:
        capture: records.
        max_passes: recordings kept, at least 1; the one that was not used for longest goes first.
    """

    def __init__(self, capture: Capture, *, max_passes: int = MAX_PASSES) -> None:
        if max_passes < 1:
            raise ConfigError(f"max_passes: expected at least 1, got {max_passes}")
        self._capture, self._max_passes = capture, max_passes
        self._recorded: OrderedDict[tuple[object, Hashable], Recorded] = OrderedDict()
        self.num_recorded = self.num_replayed = 0

    def run(self, owner: object, key: Hashable, inputs: Tensors, function: Callable[..., Tensors]) -> Tensors:
        """Replays the pass of `key`, recorded where it is new (see `Recorder.run`). Mutates: self."""
        known, device = self._recorded.get((owner, key)), self._capture.device
        if known is None:
            known = self._record((owner, key), tuple(upload(t, device).clone() for t in inputs), function)
        else:
            self._recorded.move_to_end((owner, key))
            for buffer, values in zip(known.buffers, inputs, strict=True):
                upload(values, device, buffer)
        self.num_replayed += 1
        return known.replay()

    def _record(
        self, name: tuple[object, Hashable], buffers: Tensors, function: Callable[..., Tensors]
    ) -> Recorded:
        if len(self._recorded) == self._max_passes:
            self._recorded.popitem(last=False)
        recorded = Recorded(buffers, self._capture.record(lambda: function(*buffers)))
        self._recorded[name] = recorded
        self.num_recorded += 1
        return recorded

    def forget(self, owner: object) -> None:
        """Drops an owner's recordings. Mutates: self."""
        for name in [name for name in self._recorded if name[0] is owner]:
            del self._recorded[name]

    def __len__(self) -> int:
        return len(self._recorded)
