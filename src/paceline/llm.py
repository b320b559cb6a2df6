"""`LLM`: a target and its drafter, loaded and ready: generate, chat, stream.

The composition root for Python users. Everything here is wiring; the work is in `engine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import ConfigError, IncompatiblePairError, UnsupportedTargetError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request, TokenDelta
from paceline.drafter.base import Drafter, NeuralDrafter
from paceline.drafter.combined import Combined, sure_lookup
from paceline.drafter.lookup import PromptLookup
from paceline.engine.budget import CostBudget
from paceline.engine.costs import load_costs
from paceline.engine.engine import Engine
from paceline.engine.pacing import Paced
from paceline.engine.runtime import cache_dir as chosen_cache_dir
from paceline.engine.runtime import (
    choose_device,
    choose_dtype,
    default_tree_nodes,
    probe_rows,
    record_passes,
)
from paceline.engine.tree import TreeDrafter
from paceline.target.base import Target, TargetSpec
from paceline.target.grammar import GrammarCompiler
from paceline.target.native import NativeTarget
from paceline.target.pull import DEFAULT_TARGET, cache_folder, pull
from paceline.target.text import IncrementalDecoder, TextCodec

Message = dict[str, str]
Progress = Callable[[str, int, int | None], None]
BACKENDS = ("auto", "native", "hf")
MOST_NODES = 15
"""Of a draft tree whose size is decided in each step."""


class LLM:
    """A target with its drafter.

    Args:
        target: "smollm2-135m-instruct", a hub id, a local folder, or a GGUF file.
        drafter: a drafter folder; "auto" takes the one that ships for this target, if any; "lookup" copies from the
            text itself, without weights; `None` decodes plainly.
        device: "auto", "cpu", "cuda", "cuda:N".
        dtype: "auto", "float32", "bfloat16", "float64".
        backend: "auto" takes the native runner where it fits, else transformers; or force "native" or "hf".
        block_size: slots of a chain, anchor included, up to the drafter's; 1 decodes plainly. `None` leaves the choice
            to `tree_nodes`.
        tree_nodes: draft trees of so many nodes in every step; "auto" drafts and verifies as much as pays, decided in
            each step by what passes cost on this machine (docs/budget.md; measured once, in seconds), or chains where
            `block_size` is given; `None` drafts chains of the drafter's own length. Copies are chains.
        lookup: where the text repeats itself, copy, and let a drafter with weights draft the rest (see `Combined`);
            nothing is looked up beside `None`.
        exact: `True` probes that passes of every kind give the bits of plain decoding on this machine, and refuses to
            load where they do not; `False` spends nothing on it; "auto" computes so that they do on a CPU with the
            native runner, unprobed.
        max_sequences: most texts that decode together.
        prefix_tokens: tokens of ended texts that are kept for prompts that begin alike.
        offline: never touch the network.
        progress: told (stage, done, total) while files are fetched or converted.

    Raises:
        ConfigError, DownloadError, CheckpointError, IncompatiblePairError, UnsupportedTargetError: naming the cause.
    """

    def __init__(
        self,
        target: str | Path = DEFAULT_TARGET,
        drafter: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        backend: Literal["auto", "native", "hf"] = "auto",
        block_size: int | None = None,
        tree_nodes: int | Literal["auto"] | None = "auto",
        lookup: bool = True,
        exact: bool | Literal["auto"] = "auto",
        max_sequences: int = 8,
        prefix_tokens: int = 0,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        self.checkpoint = load_drafter(drafter, str(target))
        self.folder = pull(str(target), cache_dir=chosen_cache_dir(), offline=offline, progress=progress)
        self.codec = TextCodec.load(self.folder)
        self.target, self.backend = load_target(
            self.folder, self.codec, name=str(target), dtype=self.dtype, device=self.device, backend=backend
        )
        self.grammars = GrammarCompiler(self.codec, self.target.spec.vocab_size)
        self.neural = None if self.checkpoint is None else self.bind(self.checkpoint)
        self._beside = None
        if lookup and self.neural is not None:  # copies no longer than what the drafter drafts
            self._beside = sure_lookup(block_size=min(8, self.neural.block_size))
        self.drafter = PromptLookup() if drafter == "lookup" else self._beside_lookup(self.neural)
        self.exact = self._settle_arithmetic(exact)
        self.graphs = record_passes(self.device, self.target, self.neural)
        self.paced = self._pace(progress) if tree_nodes == "auto" and block_size is None else None
        if tree_nodes == "auto":
            chain = block_size is not None or self.neural is None
            tree_nodes = None if chain else default_tree_nodes(self.device, self.dtype, self.exact)
        self.block_size, self.tree_nodes, self.max_sequences = block_size, tree_nodes, max_sequences
        self.prefix_tokens = prefix_tokens
        self.new_engine().close()  # refuses a bad block size or batch now rather than at the first request
        self._ids = itertools.count()

    def bind(self, checkpoint: DrafterCheckpoint) -> NeuralDrafter:
        """Returns the drafter of a checkpoint, ready to draft for this target (see `new_engine`).

        Raises:
            IncompatiblePairError: it was made for another target.
        """
        check_pair(checkpoint, self.target.spec)
        return checkpoint.build(self.dtype, self.device).bind(self.target.heads, checkpoint.token_ids)

    def _settle_arithmetic(self, exact: bool | Literal["auto"]) -> bool:
        """Returns whether trees have the bits of plain decoding, as far as is known. Mutates: the target."""
        if exact not in (True, False, "auto"):
            raise ConfigError(f"exact: expected True, False or 'auto', got {exact!r}")
        wanted = self.device.type == "cpu" if exact == "auto" else exact
        if isinstance(self.target, NativeTarget):
            self.target.exact = wanted
        if exact is not True:
            return wanted and self.backend == "native"
        probe = probe_rows(self.target)
        lacking = [kind for kind, keeps in probe.kinds.items() if not keeps]
        if not probe.is_exact:
            raise UnsupportedTargetError(
                f"exact: {' and '.join(lacking)} do not have the bits of plain decoding with {self.backend} in "
                f"{str(self.dtype).removeprefix('torch.')} here; hint: dtype='float32', or leave exact out"
            )
        return probe.trees is True

    def new_engine(
        self,
        *,
        plain: bool = False,
        tree_nodes: int | Literal["auto"] | None = "auto",
        max_sequences: int | None = None,
        keyed_drafts: bool = True,
        block_size: int | None = None,
        drafter: Drafter | None = None,
    ) -> Engine:
        """Returns an engine over this pair.

        Args:
            plain: leave the drafter out.
            tree_nodes: nodes of a draft tree, `None` for chains; "auto" takes `LLM`'s own choice, or chains where
                `block_size` is given.
            max_sequences: most texts that decode together; `None` takes `LLM`'s own.
            keyed_drafts: see `Engine`.
            block_size: slots of a block, anchor included; `None` takes `LLM`'s own.
            drafter: who drafts instead of the pair's own, such as `PromptLookup`; with blocks of its own size where
                none is given.

        Raises:
            ConfigError: a block size that the drafter does not have, or choices that exclude each other.
        """
        is_tree = tree_nodes not in ("auto", None)
        if plain and (is_tree or block_size is not None or drafter is not None):
            raise ConfigError(
                "plain: plain decoding takes no drafter, tree_nodes or block_size; hint: leave it out"
            )
        if drafter is not None and is_tree:
            raise ConfigError(
                f"tree_nodes: {tree_nodes} is for the pair's own drafter; hint: leave drafter out"
            )
        if drafter is None and not plain:
            if tree_nodes == "auto" and block_size is None and self.paced is not None:
                drafter = self._beside_lookup(self.paced)
            else:
                if tree_nodes == "auto":
                    tree_nodes = self.tree_nodes if block_size is None else None
                drafter = self._drafter(tree_nodes)
                block_size = self.block_size if block_size is None else block_size
        return Engine(
            self.target,
            drafter,
            max_sequences=max_sequences or self.max_sequences,
            block_size=block_size,
            new_decoder=lambda: IncrementalDecoder(self.codec),
            open_grammar=self.grammars.open,
            keyed_drafts=keyed_drafts,
            prefix_tokens=self.prefix_tokens,
        )

    def _pace(self, progress: Progress | None) -> Paced | None:
        """Returns the pair's drafter with a budget of this machine's costs, `None` without one that has weights."""
        if self.neural is None:
            return None
        is_tree = default_tree_nodes(self.device, self.dtype, self.exact) is not None
        drafter = TreeDrafter(self.neural, MOST_NODES) if is_tree else self.neural
        folder = cache_folder(chosen_cache_dir()) / "costs"
        tell = partial(progress, "measure", 0, None) if progress else lambda: None
        costs = load_costs(folder, self.target, drafter, tell=tell)
        return Paced(drafter, CostBudget(costs))

    def _drafter(self, tree_nodes: int | None) -> Drafter | None:
        if tree_nodes is None:
            return self.drafter
        if self.neural is None:
            raise ConfigError(f"tree_nodes: {tree_nodes} needs a drafter with weights, and none is loaded")
        return self._beside_lookup(TreeDrafter(self.neural, tree_nodes))

    def _beside_lookup(self, drafter: Drafter | None) -> Drafter | None:
        """Returns the drafter, together with the pair's lookup where it has one."""
        return drafter if self._beside is None or drafter is None else Combined(self._beside, drafter)

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns the continuations of raw prompts (no chat template), decoded together, in order.

        Args:
            prompts: texts, or token ids such as `render` makes.
            params: of all of them; with `n` above 1 each prompt gives `n` completions in a row.
        """
        given = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.codec.encode(p) if isinstance(p, str) else p for p in given], params)

    def chat(self, messages: str | Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Returns the answer to a conversation (or to one user message) through the target's chat template.

        Raises:
            ConfigError: more than one text asked for; `generate([llm.render(messages)], params)` gives them.
        """
        _require_one(params)
        return self._run([self.render(messages)], params)[0]

    def stream(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, plain: bool = False
    ) -> Iterator[TokenDelta]:
        """Yields the answer to a conversation as it becomes certain; leaving the loop early cancels the request."""
        _require_one(params)
        engine = self.new_engine(plain=plain)
        engine.add(self._request(self.render(messages), params))
        return _drain(engine)

    def render(self, messages: str | Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation in the target's chat template."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.codec.render_chat(list(messages))

    def _request(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Request:
        return Request(f"request-{next(self._ids)}", tuple(prompt_ids), params or SamplingParams())

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None) -> list[Completion]:
        engine = self.new_engine()
        requests = [self._request(ids, params) for ids in prompts]
        ids: list[str] = []
        try:
            for request in requests:
                ids += engine.add(request)
            while engine.has_work:
                engine.step()
        finally:
            engine.close()
        return [engine.take_completion(name) for name in ids]


def _require_one(params: SamplingParams | None) -> None:
    if params is not None and params.n > 1:
        raise ConfigError(
            f"n: expected 1 for one answer, got {params.n}; hint: generate([llm.render(messages)], params)"
        )


def _drain(engine: Engine) -> Iterator[TokenDelta]:
    try:
        while engine.has_work:
            yield from engine.step()
    finally:
        engine.close()


def load_target(
    folder: Path,
    codec: TextCodec,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "auto",
) -> tuple[Target, str]:
    """Returns the target of a local folder and the backend that runs it."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if backend != "hf":
        try:
            native = NativeTarget.load(
                folder,
                name=name,
                dtype=dtype,
                device=device,
                eos_token_ids=codec.eos_token_ids,
                tokenizer_digest=codec.digest,
            )
            return native, "native"
        except UnsupportedTargetError:
            if backend == "native":
                raise
    from paceline.target.hf import HFTarget  # transformers takes seconds to import

    return HFTarget.load(folder, name=name, dtype=dtype, device=device), "hf"


def shipped_drafter(target: str) -> Path | None:
    """Returns the folder of the drafter that ships for a target, or `None`."""
    shipped = Path(str(resources.files("paceline"))) / "data" / "drafters"
    names = [folder.name for folder in shipped.iterdir()] if shipped.is_dir() else []
    return shipped / target if target in names else None


def load_drafter(drafter: str | Path | None, target: str) -> DrafterCheckpoint | None:
    """Returns the checkpoint of the weights that `LLM`'s argument asks for, or `None` where it asks for none.

    Raises:
        ConfigError: no such folder.
        CheckpointError: a folder that holds no drafter.
    """
    if drafter is None or drafter == "lookup":
        return None
    if drafter != "auto":
        named = Path(drafter).expanduser()
        if not named.is_dir():
            raise ConfigError(
                f"drafter: expected a drafter folder, 'auto' or 'lookup'; got {str(drafter)!r}, and no such folder is "
                "there"
            )
        return DrafterCheckpoint.load(named)
    folder = shipped_drafter(target)
    return None if folder is None else DrafterCheckpoint.load(folder)


def check_pair(checkpoint: DrafterCheckpoint, spec: TargetSpec) -> None:
    """Raises `IncompatiblePairError` naming everything in which a drafter and a target do not fit."""
    config = checkpoint.config
    made_for = checkpoint.provenance.get("tokenizer_digest", "")
    pairs = [
        ("hidden_size", config.hidden_size, spec.hidden_size),
        ("vocab_size", config.vocab_size, spec.vocab_size),
        ("num_target_layers", config.num_target_layers, spec.num_layers),
        ("tokenizer digest", made_for or spec.tokenizer_digest, spec.tokenizer_digest or made_for),
    ]
    wrong = [f"{name}: drafter {ours}, target {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise IncompatiblePairError(
            f"this drafter was not made for {spec.name}: {'; '.join(wrong)}; hint: train one for it, or drafter=None"
        )
