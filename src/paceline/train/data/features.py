"""Tapped hidden states of documents, on disk in shards.

A shard is one safetensors file: `token_ids` (T,) int32 of all its documents end to end, `num_tokens` (N,) int32,
`supervised` (T,) bool, `hidden` (T, taps · D) in the stored dtype, and where they were asked for `top_ids` (T, k) int32
and `top_log_probs` (T, k) float16. The last token of a document was never run through the target, so its hidden row is
zero; no anchor can see it, since context lies strictly before the anchor. Its metadata say who made it from what,
and the digest of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from paceline.checkpoint.store import write_tensors
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.target.base import Target
from paceline.train.data.prompts import Prompt

ABSENT = -1
"""Token id of an entry of `top_ids` that holds none."""


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
    """A conversation with the target's own words marked, and the tapped hidden states.

    Args:
        token_ids: (T,) int64.
        supervised: (T,) bool, the tokens that the target wrote: one response, or the answers of several turns. Between
            two answers there is at least one token of somebody else.
        hidden: (T, taps · D); the last row is zero.
        top_ids: (T, k) int32, the likeliest tokens that the target saw at each supervised position, likeliest first:
            row t is about the token at position t. `ABSENT` elsewhere, and where fewer have any probability.
        top_log_probs: (T, k) float16, the target's own log-probabilities of these, at temperature 1; -inf where absent.
    """

    token_ids: torch.Tensor
    supervised: torch.Tensor
    hidden: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None

    @property
    def num_supervised(self) -> int:
        """How many tokens the target wrote."""
        return int(self.supervised.sum())


def blank_top(num_tokens: int, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `top_ids` and `top_log_probs` of a document that nothing was said of yet."""
    ids = torch.full((num_tokens, num_top), ABSENT, dtype=torch.int32)
    return ids, torch.full((num_tokens, num_top), -torch.inf, dtype=torch.float16)


# Shards --------------------------------------------------------------------------------------------------------------


def identity(target: Target, target_layer_ids: Sequence[int]) -> dict[str, object]:
    """Returns what a shard says of who made it; what it was made from is for the maker to add."""
    return {
        "target": target.spec.name,
        "tokenizer_digest": target.spec.tokenizer_digest,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_layer_ids": list(target_layer_ids),
    }


def shard_path(folder: Path, index: int, *, has_hidden: bool) -> Path:
    """Returns the path of a run's shard: named "features", or "answers" where it holds no hidden states. Pure."""
    return folder / f"{'features' if has_hidden else 'answers'}-{index:05d}.safetensors"


def own_share(count: int) -> range:
    """Returns which of `count` things this process makes: all of them, unless several processes train together."""
    if not (dist.is_available() and dist.is_initialized()):
        return range(count)
    return range(dist.get_rank(), count, dist.get_world_size())


def fill_shards(
    folder: Path,
    prompts: Sequence[Prompt],
    prompts_per_shard: int,
    describe: Callable[[Sequence[Prompt]], dict[str, object]],
    make: Callable[[Sequence[Prompt]], list[Document]],
    *,
    has_hidden: bool = True,
) -> Iterator[Path]:
    """Yields the path of each shard once it is there; those of an earlier run are kept.

    Where several processes train together, each makes and yields its share of them.

    Args:
        describe: what the shard of some prompts says of itself.
        make: their documents, called where no shard is found.

    Raises:
        ConfigError: a shard that says something else of itself; expected and got are named.
        CheckpointError: a shard that is not whole. Its tensors are checked by `read_shard`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(prompts), prompts_per_shard)
    parts = [prompts[start : start + prompts_per_shard] for start in starts]
    for index in own_share(len(parts)):
        path, expected = shard_path(folder, index, has_hidden=has_hidden), describe(parts[index])
        if path.exists():
            _check_identity(path, expected)
        else:
            write_shard(path, make(parts[index]), expected)
        yield path


def _check_identity(path: Path, expected: dict[str, object]) -> None:
    with _opened(path) as handle:
        found, _ = _said(handle)
    wrong = [
        f"{key}: expected {expected.get(key)!r}, got {found.get(key)!r}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
    if wrong:
        raise ConfigError(
            f"{path}: made from other prompts or settings ({'; '.join(wrong)}); hint: another `out`, or delete "
            f"{path.parent} to make them anew"
        )


def write_shard(path: Path, documents: Sequence[Document], metadata: dict[str, object]) -> None:
    """Writes a shard atomically: a reader sees the whole file or none.

    Raises:
        CheckpointError: hidden states that are not finite.
        OSError: the disk is full or read-only.
    """
    tensors = {
        "token_ids": torch.cat([d.token_ids for d in documents]).int(),
        "supervised": torch.cat([d.supervised for d in documents]),
        "num_tokens": torch.tensor([len(d.token_ids) for d in documents], dtype=torch.int32),
        "hidden": torch.cat([d.hidden for d in documents]),
    }
    top_ids = [d.top_ids for d in documents if d.top_ids is not None]
    top_log_probs = [d.top_log_probs for d in documents if d.top_log_probs is not None]
    if top_ids:
        tensors |= {"top_ids": torch.cat(top_ids), "top_log_probs": torch.cat(top_log_probs)}
    if not torch.isfinite(tensors["hidden"].sum(dtype=torch.float64)):
        raise CheckpointError(
            f"{path}: the target's hidden states are not finite; hint: a wider dtype for the target"
        )
    said = json.dumps({"made": metadata, "sha256": _digest(tensors)})
    partial = path.with_suffix(".partial")
    try:
        write_tensors(
            tensors, partial, {"paceline": said}
        )  # one key: the library writes several in any order
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_shard(path: Path) -> tuple[list[Document], dict[str, object]]:
    """Returns a shard's documents and metadata. Hidden states stay in the file, which is mapped, until they are used.

    Raises:
        CheckpointError: truncated, or its tensors are not those that were written.
    """
    with _opened(path) as handle:
        metadata, digest = _said(handle)
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        if _digest(tensors) != digest:
            raise CheckpointError(
                f"{path}: its tensors are not those that were written (sha256 expected {digest}, got another); "
                "hint: delete it and run again, which makes this shard alone anew"
            )
        sizes = tensors.pop("num_tokens").tolist()
        tensors["token_ids"] = tensors["token_ids"].long()
        pieces = {name: tensor.split(sizes) for name, tensor in tensors.items()}
        documents = [Document(**{name: p[i] for name, p in pieces.items()}) for i in range(len(sizes))]
    return documents, metadata


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Gives the open file; whatever shows that it is no shard becomes one error."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not a whole feature shard ({error}); hint: delete it and run again"
        ) from error


def _said(handle: Any) -> tuple[dict[str, object], str]:
    """Returns what a shard says of who made it from what, and the digest of its tensors."""
    said = json.loads((handle.metadata() or {})["paceline"])
    return said["made"], said["sha256"]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Returns the sha256 of names, dtypes, shapes and contents. Pure."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        state.update(tensor.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()
