"""Any transformers causal language model as a target.

The general runner: one forward pass per sequence, hidden states tapped by hooks on the decoder layers asked for, K/V
in transformers' own cache. `native.py` is the fast one, for the shapes it knows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from paceline.core.errors import CapacityError, CheckpointError, RequestError, UnsupportedTargetError
from paceline.target.base import TargetHeads, TargetOutput, TargetSpec, VerifyRows
from paceline.target.folder import check_folder
from paceline.target.rollback import check, copy_rows, keep_rows, rollback
from paceline.target.text import read_eos_token_ids, tokenizer_digest


class HFSession:
    """The K/V of one sequence in a transformers cache (see `TargetSession`)."""

    def __init__(self, cache: DynamicCache, capacity: int) -> None:
        self._cache: DynamicCache | None = cache
        self.capacity = capacity
        self.length = 0
        self.parents: tuple[int, ...] = ()  # of the last pass's rows; -1 is what was committed before it

    @property
    def cache(self) -> DynamicCache:
        """The open session's cache."""
        if self._cache is None:
            raise ValueError("the session is closed; hint: open another one")
        return self._cache

    def keep(self, rows: Sequence[int]) -> None:
        """Commits the K/V of `rows` of the last pass; drops the others.

        Raises:
            ValueError: rows that are not a path from row 0 of that pass.
        """
        above = -1
        for row in rows:
            if not 0 <= row < len(self.parents) or self.parents[row] != above:
                raise ValueError(
                    f"expected a path from row 0 through {len(self.parents)} rows, got {list(rows)}"
                )
            above = row
        keep_rows(self.cache, self.length, rows)
        self.length += len(rows)
        self.parents = ()

    def close(self) -> None:
        """Gives the K/V memory back; harmless when repeated."""
        self._cache = None


class HFTarget:
    """A frozen transformers model behind the `Target` protocol.

    Layers with a sliding window are given full-length K/V, since a ring could not roll back; their masks keep the
    window, so the result is the same.

    Args:
        model: a causal language model; put into evaluation mode and frozen.
        name, eos_token_ids, tokenizer_digest: see `TargetSpec`.

    Raises:
        UnsupportedTargetError: a state that cannot roll back, named, or decoder layers that cannot be found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer_digest: str = "",
    ) -> None:
        self._model: Any = model.eval().requires_grad_(False)
        if getattr(model, "_is_stateful", False):
            raise UnsupportedTargetError(
                f"{type(model).__name__} keeps a recurrent state, which cannot return to a shorter length once a "
                "draft is rejected; hint: use a target whose layers are all attention"
            )
        config: Any = model.config.get_text_config(decoder=True)
        check(self._new_cache(), getattr(config, "layer_types", None) or ())
        self._windows = _windows(config)
        self._layers = find_decoder_layers(model)
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._taps: tuple[int, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._tapped: dict[int, torch.Tensor] = {}
        self.spec = TargetSpec(
            name=name,
            architecture=type(model).__name__,
            hidden_size=config.hidden_size,
            num_layers=len(self._layers),
            vocab_size=self._model.get_input_embeddings().weight.shape[0],
            max_positions=_max_positions(model, config),
            eos_token_ids=eos_token_ids,
            tokenizer_digest=tokenizer_digest,
        )

    @classmethod
    def load(cls, folder: Path, *, name: str, dtype: torch.dtype, device: torch.device) -> HFTarget:
        """Returns the model of a local folder, every parameter taken from its files.

        Raises:
            CheckpointError: files that are damaged or do not fill the model.
            UnsupportedTargetError: a model that cannot be verified in blocks and rolled back.
        """
        check_folder(folder)
        try:
            with _no_progress_bar():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, local_files_only=True, output_loading_info=True
                )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{folder}: transformers cannot load it as a causal language model ({reason}); hint: fetch it "
                "again, or upgrade transformers if the model is newer"
            ) from error
        model, report = loaded
        _check_filled(folder, report)
        return cls(
            model.to(device),
            name=name,
            eos_token_ids=read_eos_token_ids(folder),
            tokenizer_digest=tokenizer_digest(folder),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of weights and activations."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where weights and K/V live."""
        device: torch.device = self._model.device
        return device

    @property
    def heads(self) -> TargetHeads:
        """Embedding and head for a drafter; the head leaves out scalings that keep the order of logits."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head is None:
            raise UnsupportedTargetError(
                f"{self.spec.architecture} has no output head that a drafter could borrow"
            )
        bias, weight = _gathered(getattr(head, "bias", None)), _gathered(head.weight)
        embed_weight = _gathered(embedding.weight)
        return TargetHeads(
            embed=embedding
            if embed_weight is embedding.weight
            else partial(F.embedding, weight=embed_weight),
            lm_head=lambda x: F.linear(x.to(self.dtype), weight, bias).to(self._logits_dtype),
            embed_weight=embed_weight,
            head_weight=weight,
        )

    def shard(self, device: torch.device) -> None:
        """Spreads the weights over all processes of the default group, for a model that fits no single device.

        Layer by layer a pass gathers the weights and lets them go again, so all processes must make the same number
        of passes, each over its own rows. `heads` gathers too. Mutates: the weights, which move to `device`.

        Raises:
            UnsupportedTargetError: no process group, as torchrun and `init_process_group` make one.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedTargetError(
                "shard: expected a group of processes, found none; hint: start the run with torchrun"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # takes seconds to import, and few runs need it

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self._layers, self._model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)

    @property
    def _logits_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def max_part_rows(self) -> int | None:
        """No pass of transformers keeps its bits for certain, so none is cut."""
        return None

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Asks for the outputs of these decoder layers (0-based), in this order; replaces what was asked before."""
        for i in layer_ids:
            if not 0 <= i < len(self._layers):
                raise UnsupportedTargetError(
                    f"target layer id {i}: expected 0…{len(self._layers) - 1} for {self.spec.name}"
                )
        for hook in self._hooks:
            hook.remove()
        self._taps = tuple(layer_ids)
        self._hooks = [
            self._layers[i].register_forward_hook(partial(self._record, i)) for i in set(layer_ids)
        ]

    def _record(self, layer_id: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

    def open(self, capacity: int) -> HFSession:
        """Returns an empty session with room for `capacity` tokens; memory is taken as it fills.

        Raises:
            CapacityError: `capacity` above the target's `max_positions`.
        """
        if capacity > self.spec.max_positions:
            raise CapacityError(
                f"{capacity} tokens asked for, {self.spec.name} has {self.spec.max_positions} positions; "
                "hint: shorten the prompt or max_new_tokens"
            )
        return HFSession(self._new_cache(), capacity)

    def fork(self, session: HFSession, length: int, capacity: int) -> HFSession:
        """Returns a new session with copies of another's first `length` tokens (see `Target.fork`)."""
        forked = self.open(capacity)
        copy_rows(session.cache, forked.cache, length)
        forked.length = length
        return forked

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        cache.layers = [DynamicLayer() if _is_ring(layer) else layer for layer in cache.layers]
        return cache

    @torch.no_grad()
    def verify(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        """Runs a forward pass for each part and returns the outputs in order (see `Target.verify`).

        Raises:
            CapacityError: more rows than a session has room for.
            RequestError: a token outside the vocabulary.
            UnsupportedTargetError: a tree for a model whose masks cannot express one.
        """
        return [self._verify(part) for part in batch]

    def _verify(self, part: VerifyRows) -> TargetOutput:
        session = part.session
        if not isinstance(session, HFSession):
            raise ValueError(f"expected a session that this target opened, got {type(session).__name__}")
        rollback(session.cache, session.length)  # an earlier pass that was never kept
        tokens = [*part.anchor_tokens, *part.proposal.tokens]
        self._check_rows(session, tokens)
        session.parents = _parents(part)
        output = self._model(
            input_ids=torch.tensor([tokens], device=self.device),
            use_cache=True,
            **self._arguments(part, session),
        )
        tapped = [self._tapped[i][0] for i in self._taps]
        self._tapped.clear()
        logits = output.logits[0, -1:] if part.last_row_only else output.logits[0]
        hidden = torch.cat(tapped, dim=-1) if tapped else logits.new_zeros((len(tokens), 0), dtype=self.dtype)
        return TargetOutput(logits=logits.to(self._logits_dtype), hidden=hidden)

    def _check_rows(self, session: HFSession, tokens: list[int]) -> None:
        if session.length + len(tokens) > session.capacity:
            raise CapacityError(
                f"{session.length} + {len(tokens)} rows do not fit the session's {session.capacity}; "
                "hint: open it with more room"
            )
        outside = [token for token in tokens if not 0 <= token < self.spec.vocab_size]
        if outside:
            raise RequestError(f"token ids: expected 0…{self.spec.vocab_size - 1}, got {outside[0]}")

    def _arguments(self, part: VerifyRows, session: HFSession) -> dict[str, Any]:
        """Returns the arguments that say where the rows stand, what they see and which logits are wanted."""
        depths = _depths(session.parents)
        wanted = {
            "cache": session.cache,
            "position_ids": torch.tensor([depths], device=self.device) + session.length,
            "logits_to_keep": 1 if part.last_row_only else 0,
        }
        arguments = {name: value for name, value in wanted.items() if name in self._accepted}
        if "cache" not in arguments:  # transformers renamed it during version 5
            arguments["past_key_values"] = session.cache
        if part.proposal.is_chain:
            return arguments
        if "position_ids" not in arguments or not self._windows:
            raise UnsupportedTargetError(
                f"{self.spec.architecture} takes chains only, since it is told no positions or its masks follow rules "
                "other than a sliding window; hint: draft a chain"
            )
        masks = {kind: self._tree_mask(session, depths, w) for kind, w in self._windows.items()}
        return arguments | {"attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}

    def _tree_mask(self, session: HFSession, depths: Sequence[int], window: int | None) -> torch.Tensor:
        """Returns the additive mask (1, 1, rows, length + rows): committed tokens and own ancestors are seen.

        With a window only the nearest of them: behind the committed tokens, rows are as far apart as their depths.
        """
        num_rows = len(session.parents)
        sees = torch.zeros(num_rows, session.length + num_rows, dtype=torch.bool)
        sees[:, : session.length] = True
        for row, above in enumerate(session.parents):
            if above >= 0:
                sees[row] = sees[above]
            sees[row, session.length + row] = True
        if window is not None:
            below = session.length + torch.tensor(depths)
            keys = torch.cat([torch.arange(session.length), below])
            sees &= below[:, None] - keys < window
        mask = torch.zeros(sees.shape, dtype=self.dtype).masked_fill_(~sees, torch.finfo(self.dtype).min)
        return mask[None, None].to(self.device)


def _gathered(weight: Any) -> Any:
    """Returns a weight in one piece, wherever its pieces are."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _is_ring(layer: object) -> bool:
    return type(layer) is DynamicSlidingWindowLayer


def _windows(config: Any) -> dict[str, int | None]:
    """Returns the window of each kind of layer, by the names under which transformers takes masks.

    Empty where layers follow other rules (chunks, windows of several sizes).
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    rings: list[Any] = [layer for layer in DynamicCache(config=config).layers if _is_ring(layer)]
    if not kinds <= {"full_attention", "sliding_attention"} or any(r.sliding_window != window for r in rings):
        return {}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _parents(part: VerifyRows) -> tuple[int, ...]:
    """Returns each row's parent row; -1 for row 0, which hangs on the committed tokens."""
    root = len(part.anchor_tokens) - 1
    return (*range(-1, root), *(root + parent for parent in part.proposal.parents))


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for above in parents:
        depths.append(depths[above] + 1 if above >= 0 else 0)
    return depths


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the list of decoder layers.

    Raises:
        UnsupportedTargetError: no such list; says what was found instead.
    """
    config: Any = model.config.get_text_config(decoder=True)
    decoder: Any = model.get_decoder()
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return child
    found = ", ".join(f"{name}: {type(child).__name__}" for name, child in decoder.named_children())
    raise UnsupportedTargetError(
        f"{type(model).__name__}: expected a list of {config.num_hidden_layers} decoder layers in "
        f"{type(decoder).__name__}, found {found}; hidden states cannot be tapped"
    )


def _max_positions(model: PreTrainedModel, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise UnsupportedTargetError(
            f"{type(model).__name__}: its config has no max_position_embeddings, so no limit can be kept; "
            "hint: set it in config.json"
        )
    return limit


def _check_filled(folder: Path, report: dict[str, Any]) -> None:
    """Checks transformers' loading report: it fills parameters that a file lacks with random numbers."""
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise CheckpointError(
            f"{folder}: parameters missing or of another shape than config.json says: {', '.join(absent[:4])}"
            f"{f' and {len(absent) - 4} more' if len(absent) > 4 else ''}; hint: fetch the model again"
        )
    if report["unexpected_keys"]:
        names = ", ".join(sorted(report["unexpected_keys"])[:4])
        warnings.warn(f"{folder}: tensors that the model does not use: {names}", stacklevel=3)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keeps transformers from drawing on the terminal while loading."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
