"""Tapped hidden states of documents, on disk in shards.

A shard is one safetensors file: `token_ids` (T,) int32 of all its documents end to end, `num_tokens` and
`num_prompt_tokens` (N,) int32, `hidden` (T, taps · D) in the stored dtype. The last token of a document was never run
through the target, so its hidden row is zero; no anchor can see it, since context lies strictly before the anchor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoint.store import write_tensors
from paceline.core.errors import CheckpointError
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal


@dataclass(slots=True)
class Recording:
    """The tapped rows of one sequence, as they were committed."""

    rows: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class FeatureRecorder:
    """A drafter that never guesses and remembers what it is shown: regeneration and tapping in one pass.

    Args:
        target_layer_ids: decoder layers to tap.
        dtype: dtype of the kept rows.
    """

    block_size = 2

    def __init__(self, target_layer_ids: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.target_layer_ids = tuple(target_layer_ids)
        self.recordings: list[Recording] = []
        self._dtype = dtype

    def open(self, capacity: int) -> Recording:
        """Returns an empty recording; `recordings` lists them in admission order."""
        self.recordings.append(Recording())
        return self.recordings[-1]

    def inject(
        self, contexts: Sequence[Recording], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Copies each sequence's newly committed rows, in one transfer however many sequences there are."""
        copied = torch.cat(list(hidden)).to("cpu", self._dtype)
        for context, rows in zip(contexts, copied.split([len(h) for h in hidden]), strict=True):
            context.rows.append(rows)
            context.length += len(rows)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Recording],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns empty proposals: plain decoding."""
        return [EMPTY_PROPOSAL] * len(anchors)


@dataclass(frozen=True, slots=True)
class Document:
    """One prompt with the target's response and the tapped hidden states.

    Args:
        token_ids: (T,) int64.
        num_prompt_tokens: tokens before the response.
        hidden: (T, taps · D); the last row is zero.
    """

    token_ids: torch.Tensor
    num_prompt_tokens: int
    hidden: torch.Tensor


def write_shard(path: Path, documents: Sequence[Document], metadata: dict[str, object]) -> None:
    """Writes a shard atomically: a reader sees the whole file or none."""
    tensors = {
        "token_ids": torch.cat([d.token_ids for d in documents]).int(),
        "num_tokens": torch.tensor([len(d.token_ids) for d in documents], dtype=torch.int32),
        "num_prompt_tokens": torch.tensor([d.num_prompt_tokens for d in documents], dtype=torch.int32),
        "hidden": torch.cat([d.hidden for d in documents]),
    }
    partial = path.with_suffix(".partial")
    try:
        write_tensors(tensors, partial, {"paceline": json.dumps(metadata)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_shard(path: Path) -> tuple[list[Document], dict[str, object]]:
    """Returns a shard's documents and metadata.

    Raises:
        CheckpointError: truncated, or with hidden states that are not finite.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = json.loads((handle.metadata() or {}).get("paceline", "{}"))
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        sizes = tensors["num_tokens"].tolist()
        ids, hidden = tensors["token_ids"].long().split(sizes), tensors["hidden"].split(sizes)
        parts = zip(ids, tensors["num_prompt_tokens"].tolist(), hidden, strict=True)
        documents = [Document(*part) for part in parts]
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not a whole feature shard ({error}); hint: delete it and run again"
        ) from error
    if not torch.isfinite(tensors["hidden"].sum(dtype=torch.float64)):
        raise CheckpointError(f"{path}: hidden states are not finite; hint: delete it and run again")
    return documents, metadata
