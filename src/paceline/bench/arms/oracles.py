"""Other implementations of the same pair: transformers' own decoding, and z-lab's `dflash`; one prompt at a time.

The only place beside `target/hf.py` that runs transformers' models: they are there to be compared with. Times are taken
where tokens become known: transformers has a streamer for it; z-lab's loop streams nothing, so a hook tells when its
drafter is asked for the next block, which is as soon as one is decided.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from paceline.bench.arms.base import ArmError
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.block import LayerRule, attends
from paceline.core.params import SamplingParams
from paceline.drafter.config import DrafterConfig
from paceline.llm import LLM

ZLAB_PACKAGE = "dflash==0.1.0"


@dataclass(slots=True)
class Trace:
    """An answer, and when which part of it became known.

    Args:
        ids: its tokens, an end token included.
        times: `perf_counter` at each piece; the first piece is the token that closes prefill.
        sizes: tokens of each piece.
        drafted: of each piece after the first, how many drafts were verified for it.
    """

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> tuple[tuple[int, int, int], ...]:
        """See `Outcome`; steps without drafts count too.

        Deviation: counted in delivered tokens. Nobody tells what the target thought of drafts behind an end of text or
        beyond the length limit, so the last step may count fewer than it would in our engine.
        """
        steps = Counter(zip(self.drafted, (size - 1 for size in self.sizes[1:]), strict=True))
        return tuple((*step, count) for step, count in sorted(steps.items()))


class Oracle(Protocol):
    """Another implementation."""

    @property
    def engine(self) -> str:
        """Its name and version."""

    def open(self, llm: LLM, target: Any) -> None:
        """Loads what it needs beside transformers' copy of the target.

        Raises:
            ArmError: it is not installed, or cannot run this pair.
        """

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> Trace:
        """Returns the answer to a prompt; limit, temperature, top_p and top_k are kept, the rest is not looked at."""

    def close(self) -> None:
        """Frees what it loaded."""


def load_target(llm: LLM) -> Any:
    """Returns transformers' model of a pair's target folder, in the pair's dtype and on its device.

    Raises:
        ArmError: parameters that the folder does not fill.
    """
    with _quietly():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            llm.folder, dtype=llm.dtype, local_files_only=True, output_loading_info=True
        )
    model, report = loaded
    _check_filled(f"{llm.folder} in transformers", report)
    model.generation_config = GenerationConfig()  # the folder's own defaults could change texts
    return model.to(llm.device).eval().requires_grad_(False)


def _check_filled(what: str, report: Mapping[str, Any]) -> None:
    absent = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind]]
    if absent:
        raise ArmError(
            f"{what}: expected a tensor for every parameter, found none for {', '.join(absent[:4])}"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps progress bars from the terminal and random numbers as they were while a model is built."""
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if has_bar:
            transformers_logging.enable_progress_bar()


# transformers --------------------------------------------------------------------------------------------------------


class Transformers:
    """`generate` of transformers.

    Args:
        arguments: further ones for it, such as `prompt_lookup_num_tokens`.
    """

    engine = f"transformers {transformers_version}"

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._model: Any = None
        self._eos_token_ids: list[int] = []

    def open(self, llm: LLM, target: Any) -> None:
        """See `Oracle`."""
        self._model, self._eos_token_ids = target, list(llm.codec.eos_token_ids)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> Trace:
        """See `Oracle`."""
        row, pieces = torch.tensor([prompt], device=self._model.device), _Pieces()
        hook = self._model.register_forward_pre_hook(pieces.note_rows, with_kwargs=True)
        try:
            self._model.generate(
                row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=params.max_new_tokens,
                eos_token_id=self._eos_token_ids or None,
                pad_token_id=0,  # one row is never padded
                streamer=pieces,
                **_sampling(params),
                **self._arguments,
            )
        finally:
            hook.remove()
        return pieces.trace

    def close(self) -> None:
        """See `Oracle`."""
        self._model = None


class TransformersDFlash(Transformers):
    """transformers' own DFlash loop, with a pair's drafter as its assistant."""

    def open(self, llm: LLM, target: Any) -> None:
        """See `Oracle`."""
        assistant = build_assistant(drafter_of(llm), llm.dtype, llm.device)
        self._arguments = {"assistant_model": assistant, "speculation_type": "dflash"}
        super().open(llm, target)

    def close(self) -> None:
        """See `Oracle`."""
        self._arguments = {}
        super().close()


class _Pieces:
    """A streamer that notes what comes when, with a hook that notes how many rows each pass has."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._has_prompt = False

    def put(self, ids: torch.Tensor) -> None:
        """Takes the prompt, then each piece of the answer."""
        if self._has_prompt:
            self.trace.times.append(perf_counter())
            self.trace.sizes.append(ids.numel())
            self.trace.ids += ids.flatten().tolist()
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""

    def note_rows(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A pass has a row for the anchor and one for each draft, but for the first, which is prefill."""
        if self.trace.sizes:
            self.trace.drafted.append(kwargs["input_ids"].shape[1] - 1)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.is_greedy:
        return {"do_sample": False}
    chosen = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    return {"do_sample": True, **chosen}


def build_assistant(
    checkpoint: DrafterCheckpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Any:
    """Returns transformers' DFlash assistant with a drafter's weights, all of them, and with its masks.

    Deviation: left alone, the assistant lets all slots of a block see each other, and windows reach a token further.
    In z-lab's format layers that slide look back only, unless the config says otherwise; so a hook hands the masks in.

    Raises:
        ArmError: a transformers that has none, or a drafter that it cannot run.
    """
    config = checkpoint.config
    if not isinstance(config, DrafterConfig) or config.variant != "dflash":
        raise ArmError("transformers runs DFlash drafters of the first kind alone; hint: leave the arm out")
    model = _empty_assistant(config)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {names.get(name, name): tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    rules = {kind: (i, config.layer_rules[i]) for i, kind in enumerate(config.layer_types)}
    model.register_forward_pre_hook(partial(_hand_masks, rules), with_kwargs=True)
    return model.to(device).eval().requires_grad_(False)


def _empty_assistant(config: DrafterConfig) -> Any:
    try:
        from transformers.models import muse_glimmer_assistant as theirs
    except ImportError as error:
        raise ArmError(
            f"transformers {transformers_version} has no DFlash of its own; hint: use 5.24 or newer"
        ) from error
    with _quietly():
        return theirs.MuseGlimmerAssistantModel(theirs.MuseGlimmerAssistantConfig(**_assistant_shape(config)))


def _hand_masks(
    rules: Mapping[str, tuple[int, LayerRule]], model: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook that puts masks (1, 1, S, keys) in the place of one for padding, which a single row does not have.

    Args:
        rules: by kind of layer, the index of a layer of that kind and what its slots may see.
    """
    num_slots, masks = kwargs["noise_embeds"].shape[1], {}
    for kind, (layer, rule) in rules.items():
        num_keys, _ = kwargs["cache"].get_mask_sizes(num_slots, layer)
        keys = torch.arange(num_keys, device=kwargs["noise_embeds"].device)
        slots, anchor = keys[-num_slots:, None], num_keys - num_slots
        block = attends(slots, keys, anchor, rule, in_block=True)
        masks[kind] = (block | attends(slots, keys, anchor, rule, in_block=False))[None, None]
    return args, kwargs | {"attention_mask": masks}


def _assistant_shape(config: DrafterConfig) -> dict[str, Any]:
    window = {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "layer_types": list(config.layer_types),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **window,
    }


# z-lab ---------------------------------------------------------------------------------------------------------------


class ZLab:
    """`dflash_generate` of z-lab's package, on transformers' copy of the target."""

    def __init__(self) -> None:
        self._target: Any = None
        self._drafter: Any = None
        self._generate: Callable[..., torch.Tensor] | None = None
        self._eos_token_ids: list[int] = []

    @property
    def engine(self) -> str:
        """See `Oracle`."""
        return f"z-lab dflash {version('dflash')} on transformers {transformers_version}"

    def open(self, llm: LLM, target: Any) -> None:
        """See `Oracle`."""
        try:
            from dflash.model import DFlashDraftModel, dflash_generate
        except ImportError as error:
            raise ArmError(
                f"z-lab's package cannot be imported ({error}); hint: pip install --no-deps {ZLAB_PACKAGE}"
            ) from error
        with TemporaryDirectory() as folder, _quietly():
            place = Path(folder) / "drafter"
            drafter_of(llm).save(place)
            model, report = DFlashDraftModel.from_pretrained(place, dtype=llm.dtype, output_loading_info=True)
        _check_filled("the drafter in z-lab's package", report)
        self._drafter, self._target = model.to(llm.device).eval().requires_grad_(False), target
        self._generate, self._eos_token_ids = dflash_generate, list(llm.codec.eos_token_ids)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> Trace:
        """See `Oracle`."""
        assert self._generate is not None
        blocks = _Blocks()
        hook = self._drafter.register_forward_pre_hook(blocks.note, with_kwargs=True)
        try:
            with warnings.catch_warnings():  # it passes caches by a name that transformers is giving up
                warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
                output = self._generate(
                    self._drafter,
                    self._target,
                    torch.tensor([prompt], device=self._target.device),
                    max_new_tokens=params.max_new_tokens,
                    stop_token_ids=self._eos_token_ids or None,
                    temperature=0.0 if params.is_greedy else params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k,
                )
        finally:
            hook.remove()
        return blocks.finish(output[0, len(prompt) :].tolist())

    def close(self) -> None:
        """See `Oracle`."""
        self._drafter = self._target = self._generate = None


class _Blocks:
    """A hook that notes each block z-lab's drafter is asked for; it is told the states of what was kept before."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._kept: list[int] = []  # by prefill and by each block but the last
        self._drafted: list[int] = []

    def note(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        self._times.append(perf_counter())
        self._kept.append(kwargs["target_hidden"].shape[1])
        self._drafted.append(kwargs["noise_embedding"].shape[1] - 1)

    def finish(self, ids: list[int]) -> Trace:
        """Returns the trace of an answer that ends now."""
        sizes = [1, *self._kept[1:]]
        if self._drafted:
            sizes.append(len(ids) - sum(sizes))
        return Trace(ids, [*self._times, perf_counter()], sizes, self._drafted)


def drafter_of(llm: LLM) -> DrafterCheckpoint:
    """Returns the pair's drafter.

    Raises:
        ArmError: it has none, or one that transformers cannot feed.
    """
    if llm.checkpoint is None:
        raise ArmError(
            "a DFlash arm needs a drafter, and the pair has none; hint: give one, or leave the arm out"
        )
    config = llm.checkpoint.config
    if not isinstance(config, DrafterConfig):
        raise ArmError("expected a DFlash drafter, got an EAGLE-3 one; hint: leave the arm out")
    if config.target_layer_ids[-1] == config.num_target_layers - 1:
        raise ArmError(
            f"target_layer_ids: this drafter reads layer {config.target_layer_ids[-1]}, the last one, whose output "
            "transformers hands out behind the final norm only; hint: leave the arm out"
        )
    return llm.checkpoint
