"""Who drafts in an arm of this process: from a plan's options to a drafter, and what a fingerprint says of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import ConfigError
from paceline.drafter.base import Drafter, NeuralDrafter
from paceline.drafter.combined import Combined, sure_lookup
from paceline.drafter.config import DrafterConfig
from paceline.drafter.lookup import PromptLookup
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM

Options = Mapping[str, str | int | float | bool]

_BLOCKS, _NGRAMS = ("block_size", "tree_nodes"), ("max_ngram", "min_ngram")
_OPTIONS = {
    "plain": (),
    "dflash": _BLOCKS,
    "drafter": ("path", *_BLOCKS),
    "lookup": ("block_size", *_NGRAMS),
    "combined": (*_BLOCKS, *_NGRAMS),
}
LOCAL_KINDS = tuple(_OPTIONS)
_READ_ELSEWHERE = ("fc.", "hidden_norm.", "lm_head.")
"""Parameters that `inject` reads, and an own head, of which a vocabulary may leave a part."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A drafter with weights, bound to the pair's target, and the checkpoint it was built from."""

    neural: NeuralDrafter
    checkpoint: DrafterCheckpoint

    @property
    def variant(self) -> str:
        """Which sort of drafter it is."""
        config = self.checkpoint.config
        return config.variant if isinstance(config, DrafterConfig) else "eagle3"

    @property
    def num_parameters(self) -> int:
        """Of its own; what it borrows of the target does not count."""
        return sum(parameter.numel() for parameter in self.neural.parameters())

    @property
    def digest(self) -> str:
        """The sha256 of its config, tensors and vocabulary."""
        checkpoint = self.checkpoint
        digest = hashlib.sha256(repr(checkpoint.config).encode())
        tensors = dict(sorted(checkpoint.tensors.items()))
        if checkpoint.token_ids is not None:
            tensors["token_ids"] = checkpoint.token_ids
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def memory(self, num_bytes: int) -> dict[str, int]:
        """Returns bytes of its parameters, its cut of the target's head included, and of its K/V.

        Args:
            num_bytes: of one number.
        """
        config, token_ids = self.checkpoint.config, self.checkpoint.token_ids
        num_layers = config.num_layers if isinstance(config, DrafterConfig) else 1
        num_head_rows = 0 if token_ids is None else len(token_ids)
        return {
            "drafter_weights": num_bytes * (self.num_parameters + num_head_rows * config.hidden_size),
            "drafter_kv_per_token": 2 * num_bytes * num_layers * config.num_kv_heads * config.head_dim,
        }

    def num_read(self, num_draft_tokens: int) -> int:
        """Returns how many numbers one draft reads: layers and head, once for each forward pass that it takes.

        What `inject` takes does not count, nor rows that are looked up.
        """
        config, token_ids = self.checkpoint.config, self.checkpoint.token_ids
        if isinstance(config, DrafterConfig):
            num_passes, num_head_rows = 1, config.vocab_size
        else:  # token by token
            num_passes = min(num_draft_tokens, config.num_draft_tokens)
            num_head_rows = config.draft_vocab_size
        if token_ids is not None:
            num_head_rows = min(num_head_rows, len(token_ids))
        layers = sum(
            parameter.numel()
            for name, parameter in self.neural.named_parameters()
            if not name.startswith(_READ_ELSEWHERE) and not name.endswith("codebook")
        )
        return num_passes * (layers + num_head_rows * config.hidden_size)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts in an arm.

    Args:
        drafter: as the engine gets it.
        block_size: rows of a step, anchor included; `None` takes the drafter's.
        weights: of the drafter with weights that `drafter` is or holds, if any.
    """

    drafter: Drafter
    block_size: int | None = None
    weights: Weights | None = None

    def speculation(self, num_rows: int) -> dict[str, str]:
        """Returns what a fingerprint says of it.

        Args:
            num_rows: of a step, anchor included.
        """
        drafter = self.drafter
        if isinstance(drafter, PromptLookup):
            return {"kind": "lookup", "block_size": str(drafter.block_size), **_ngrams(drafter)}
        assert self.weights is not None
        if not isinstance(drafter, Combined):
            return {"kind": self.weights.variant, **_neural(self.weights, drafter, num_rows)}
        return {
            "kind": "combined",
            "variant": self.weights.variant,
            **_neural(self.weights, drafter.drafter, num_rows),
            "lookup_block_size": str(min(num_rows, drafter.lookup.block_size)),
            **_ngrams(drafter.lookup),
        }

    def num_read(self, num_rows: int) -> int | None:
        """Returns how many numbers one draft reads; `None` where not every step drafts with weights.

        Args:
            num_rows: of a step, anchor included.
        """
        if self.weights is None or num_rows < 2 or not isinstance(self.drafter, NeuralDrafter | TreeDrafter):
            return None
        return self.weights.num_read(num_rows - 1)


def _ngrams(lookup: PromptLookup) -> dict[str, str]:
    return {"max_ngram": str(lookup.max_ngram), "min_ngram": str(lookup.min_ngram)}


def _neural(weights: Weights, drafter: Drafter, num_rows: int) -> dict[str, str]:
    """Returns which drafter with weights it is, and whether it drafts chains or trees."""
    is_tree, rows = isinstance(drafter, TreeDrafter), min(num_rows, drafter.block_size)
    return {
        "drafter_digest": weights.digest,
        "num_parameters": str(weights.num_parameters),
        "block_size": str(weights.neural.block_size if is_tree else rows),
        "tree_nodes": str(rows - 1 if is_tree else 0),
    }


def drafting(kind: str, options: Options, llm: LLM) -> Drafting | None:
    """Returns who drafts in an arm of a kind, `None` where nobody does.

    Raises:
        ConfigError: an unknown kind or option, a value that makes no drafter, or no drafter where the kind needs one.
        CheckpointError, IncompatiblePairError: the folder holds no drafter, or one for another target.
    """
    numbers = _numbers(kind, options)
    if kind == "plain":
        return None
    if kind == "lookup":
        return Drafting(PromptLookup(**numbers))
    if kind == "drafter":
        return _shaped(_opened(options.get("path"), llm), numbers, llm)
    if llm.neural is None or llm.checkpoint is None:
        raise ConfigError(f"{kind}: the pair has no drafter; hint: give one, or leave the arm out")
    own = _shaped(Weights(llm.neural, llm.checkpoint), numbers, llm)
    if kind == "dflash":
        return own
    lookup = sure_lookup(**{name: numbers[name] for name in _NGRAMS if name in numbers})
    return replace(own, drafter=Combined(lookup, own.drafter))


def _numbers(kind: str, options: Options) -> dict[str, int]:
    """Returns the options that are whole numbers: all but `path`."""
    if kind not in LOCAL_KINDS:
        raise ConfigError(f"expected one of {', '.join(LOCAL_KINDS)}; got {kind!r}")
    numbers: dict[str, int] = {}
    for option, value in options.items():
        if option not in _OPTIONS[kind]:
            known = ", ".join(_OPTIONS[kind]) or "none"
            raise ConfigError(f"{kind} has the options {known}; got {option!r}")
        if option == "path":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{option}: expected a whole number, got {value!r}")
        numbers[option] = value
    return numbers


def _opened(path: object, llm: LLM) -> Weights:
    if not isinstance(path, str):
        raise ConfigError(f"path: expected the folder of a drafter, got {path!r}; hint: path=FOLDER")
    checkpoint = DrafterCheckpoint.load(Path(path).expanduser())
    return Weights(llm.bind(checkpoint), checkpoint)


def _shaped(weights: Weights, numbers: Mapping[str, int], llm: LLM) -> Drafting:
    """Returns a drafter with weights that drafts chains or trees, as the pair does where the numbers do not say."""
    block_size, nodes = numbers.get("block_size"), numbers.get("tree_nodes")
    if nodes and block_size is not None:
        raise ConfigError(
            "tree_nodes, block_size: a tree is as large as its nodes; hint: give one of the two"
        )
    if nodes is None and block_size is None:
        nodes = llm.tree_nodes
    if not nodes and block_size is None:
        block_size = llm.block_size
    drafter = TreeDrafter(weights.neural, nodes) if nodes else weights.neural
    return Drafting(drafter, block_size, weights)
