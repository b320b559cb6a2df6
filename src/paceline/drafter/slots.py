"""Contexts of one drafter side by side in one tensor, where a recorded pass finds them by slot.

Before the rows of each context lie as many as a block has slots. They belong to no context: a pass lays its block's
keys and values there, so that attention reads block and context in one piece.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.block import LayerRule, attends
from paceline.core.recorder import MAX_SEQUENCES, Recorder, length_bucket, window
from paceline.drafter.context import ContextKV


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle of fixed size that a draft is padded to.

    Args:
        first, num_slots: the slots that it covers, all of them whoever drafts; the others see their own block alone.
        width: slots of a block.
        length: rows of contexts that it sees, T.
    """

    first: int
    num_slots: int
    width: int
    length: int

    def seen(self, positions_NS: torch.Tensor, rule: LayerRule) -> torch.Tensor:
        """Returns which keys each slot of a block sees, (N, S, S + T): its block's, then its context's. Pure."""
        query, anchor = positions_NS[:, :, None], positions_NS[:, :1, None]
        behind = torch.arange(self.length, device=positions_NS.device)
        block = attends(query, positions_NS[:, None], anchor, rule, in_block=True)
        return torch.cat([block, attends(query, behind, anchor, rule, in_block=False)], dim=-1)


class SlotContext(ContextKV):
    """A `ContextKV` that lies in a slot, until nobody holds it any more."""

    def __init__(self, slots: ContextSlots, slot: int, capacity: int) -> None:
        self.length, self.capacity = 0, capacity
        self.slot, self._slots = slot, slots
        self.lie()

    def lies_in(self, slots: ContextSlots) -> bool:
        """Whether it is one of these."""
        return self._slots is slots

    def lie(self) -> None:
        """Finds its rows again where the slots have moved. Mutates: storage."""
        lead = self._slots.lead
        self._kv = self._slots.kv[:, :, self.slot, :, lead : lead + self.capacity]

    def fork(self, length: int, capacity: int) -> SlotContext:
        """Returns a context with room for `capacity` tokens that holds copies of the first `length` rows."""
        forked = self._slots.open(capacity)
        forked._kv[:, :, :, :length] = self._kv[:, :, :, :length]
        forked.length = length
        return forked


class ContextSlots:
    """Storage of a drafter's contexts, (layers, 2, slots, G, lead + rows, E), a power of two of slots.

    Args:
        sizes: layers, G and E.
        lead: rows before those of a context.
        like: of the dtype and on the device of the storage.
        owner: the drafter, whose recordings end where the storage moves.
        recorder: who holds them.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        lead: int,
        like: torch.Tensor,
        owner: object,
        recorder: Recorder,
    ) -> None:
        layers, groups, head_dim = sizes
        self.lead, self.recorder = lead, recorder
        self.kv = like.new_zeros(layers, 2, 0, groups, lead, head_dim)
        self._owner = weakref.ref(owner)
        self._free: list[int] = []
        self._open: weakref.WeakSet[SlotContext] = weakref.WeakSet()

    @property
    def room(self) -> int:
        """Most rows of a context."""
        return self.kv.shape[4] - self.lead

    def open(self, capacity: int) -> SlotContext:
        """Returns an empty context in the lowest free slot; grows the storage when needed."""
        if not self._free or capacity > self.room:
            self._grow(capacity)
        self._free.sort(reverse=True)
        context = SlotContext(self, self._free.pop(), capacity)
        weakref.finalize(context, self._free.append, context.slot)
        self._open.add(context)
        return context

    def frame(self, contexts: Sequence[ContextKV], width: int) -> Frame | None:
        """Returns the frame of a draft of blocks of `width` slots, or `None` where it fits none."""
        slots = [c.slot for c in contexts if isinstance(c, SlotContext) and c.lies_in(self)]
        if len(slots) < len(contexts) or width > self.lead or window(slots)[1] > MAX_SEQUENCES:
            return None
        longest = max(context.length for context in contexts)
        return Frame(*window(slots), width, length_bucket(max(1, longest), self.room))

    def seats(self, contexts: Sequence[ContextKV], frame: Frame) -> list[int]:
        """Returns where in a frame each context is."""
        return [context.slot - frame.first for context in contexts if isinstance(context, SlotContext)]

    def lay(self, layer: int, frame: Frame, kv: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values (N, G, S + T, E) of blocks and contexts, the blocks' (N, S, G, E) laid before them.

        Mutates: leading rows.
        """
        slots, first = slice(frame.first, frame.first + frame.num_slots), self.lead - frame.width
        keys, values = self.kv[layer, :, slots, :, first : self.lead + frame.length]
        for cached, laid in zip((keys, values), kv, strict=True):
            cached[:, :, : frame.width] = laid.transpose(1, 2)
        return keys, values

    def _grow(self, capacity: int) -> None:
        layers, _, num_slots, groups, rows, head_dim = self.kv.shape
        wanted = num_slots if self._free else max(1, 2 * num_slots)
        if capacity > self.room:  # by at least half again, so that growing many times costs little
            rows = self.lead + max(capacity, self.room * 3 // 2)
        self.recorder.forget(self._owner())
        old, self.kv = self.kv, self.kv.new_zeros(layers, 2, wanted, groups, rows, head_dim)
        self.kv[:, :, :num_slots, :, : old.shape[4]] = old
        self._free.extend(range(num_slots, wanted))
        for context in self._open:
            context.lie()
