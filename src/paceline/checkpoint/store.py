"""`DrafterCheckpoint`: config, tensors and provenance in memory, format-free; atomic folders on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.checkpoint import eagle3, zlab
from paceline.core.errors import CheckpointError, ConfigError, UnknownFormatError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import Eagle3Config, NeuralConfig
from paceline.drafter.eagle3 import Eagle3

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
VOCABULARY = "draft_vocabulary.json"
"""Beside z-lab's layout: {"token_ids": […]}, the tokens worth drafting, so that a reader may cut the head; others use
the whole head. No safetensors file, since engines load all of a folder's as weights."""
_OLD_VOCABULARY = "draft_vocabulary.safetensors"
ARCHITECTURES = (*zlab.ARCHITECTURES.values(), eagle3.ARCHITECTURE)
"""By which a config says that it is a drafter's, and whose layout the folder has."""


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter at rest.

    Args:
        config: its shape.
        tensors: weights by the names of `manifest(config)`.
        provenance: where it comes from: recipe, data digest, counts, curve; free-form JSON.
        token_ids: (V',) int64 tokens worth drafting, ascending; `None` for all, and for EAGLE-3, whose tensors say it.
    """

    config: NeuralConfig
    tensors: dict[str, torch.Tensor]
    provenance: dict[str, Any] = field(default_factory=dict)
    token_ids: torch.Tensor | None = None

    @classmethod
    def load(cls, folder: Path) -> DrafterCheckpoint:
        """Returns the checkpoint stored in a folder of z-lab's layout or EAGLE-3's.

        Raises:
            UnknownFormatError: no config.json there, or of another format.
            CheckpointError: weights missing, truncated, or not those of the config.
        """
        if not (folder / CONFIG).is_file():
            raise UnknownFormatError(
                f"{folder}: expected a drafter folder with {CONFIG} and {WEIGHTS}; found none"
            )
        try:
            config = _config_from_json(_read_json(folder / CONFIG))
        except (ConfigError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / CONFIG}: {error}") from error
        tensors = _read(folder / WEIGHTS)
        check(config, tensors, str(folder / WEIGHTS))
        provenance = folder / PROVENANCE
        return cls(
            config,
            tensors,
            _read_json(provenance) if provenance.is_file() else {},
            _read_token_ids(folder, config),
        )

    def save(self, folder: Path) -> None:
        """Writes the folder so that a reader sees the old one or the new one, never a mixture.

        Raises:
            CheckpointError: the tensors are not those of the config.
            OSError: the disk is full or read-only; an earlier checkpoint stays as it was.
        """
        check(self.config, self.tensors, str(folder))
        with replaced_folder(folder) as partial:
            weights = {k: v.contiguous() for k, v in self.tensors.items()}
            write_tensors(weights, partial / WEIGHTS, {"format": "pt"})
            _write_json(partial / CONFIG, _config_to_json(self.config, self.dtype))
            _write_json(partial / PROVENANCE, self.provenance)
            if self.token_ids is not None:
                _write_json(partial / VOCABULARY, {"token_ids": self.token_ids.tolist()}, indent=None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored weights."""
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> NeuralDrafter:
        """Returns the drafter module with these weights."""
        with torch.device("meta"):  # nothing to fill at random, no random numbers drawn
            drafter = new_drafter(self.config)
        weights = {name: _copy(tensor, device, dtype) for name, tensor in self.tensors.items()}
        drafter.load_state_dict(weights, assign=True)
        drafter.recall(self.token_ids)
        return drafter

    @classmethod
    def of(
        cls,
        drafter: NeuralDrafter,
        dtype: torch.dtype,
        provenance: dict[str, Any],
        token_ids: torch.Tensor | None = None,
    ) -> DrafterCheckpoint:
        """Returns a copy of a module's weights in `dtype`.

        Args:
            token_ids: what it was trained to draft; an EAGLE-3 drafter knows that itself.
        """
        tensors = {name: _copy(tensor, "cpu", dtype) for name, tensor in drafter.state_dict().items()}
        if isinstance(drafter.config, Eagle3Config):
            token_ids = None
        return cls(drafter.config, tensors, provenance, token_ids)


# Layouts -------------------------------------------------------------------------------------------------------------


def new_drafter(config: NeuralConfig) -> NeuralDrafter:
    """Returns a module of the config's kind, with a new drafter's weights."""
    return Eagle3(config) if isinstance(config, Eagle3Config) else zlab.new_drafter(config)


def manifest(config: NeuralConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor's name and shape. Pure."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in new_drafter(config).state_dict().items()}


def check(config: NeuralConfig, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Raises `CheckpointError` naming every tensor that is missing, unknown or of another shape."""
    expected = manifest(config)
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in tensors]
    problems += [f"unknown {name} {tuple(tensors[name].shape)}" for name in tensors if name not in expected]
    problems += [
        f"{name}: expected {shape}, got {tuple(tensors[name].shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{where}: tensors do not match the config: {shown}")
    if isinstance(config, Eagle3Config):
        eagle3.check_vocabulary(config, tensors, where)


def _config_from_json(raw: dict[str, Any]) -> NeuralConfig:
    architectures = raw.get("architectures") or []
    if architectures not in [[name] for name in ARCHITECTURES]:
        raise UnknownFormatError(
            f"architectures: expected one of {', '.join(ARCHITECTURES)}, got {architectures}"
        )
    is_eagle3 = architectures == [eagle3.ARCHITECTURE]
    return eagle3.config_from_json(raw) if is_eagle3 else zlab.config_from_json(raw)


def _config_to_json(config: NeuralConfig, dtype: torch.dtype) -> dict[str, Any]:
    if isinstance(config, Eagle3Config):
        return eagle3.config_to_json(config, dtype)
    return zlab.config_to_json(config, dtype)


def _copy(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of a weight in `dtype`; what counts or chooses keeps its own. Pure."""
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


# Files ---------------------------------------------------------------------------------------------------------------


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to fill; puts it in the place of `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    partial.chmod(0o755)
    try:
        yield partial
        _replace(folder, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(folder: Path, partial: Path) -> None:
    """Puts `partial` in the place of `folder`, whose old content returns if that fails."""
    retired = partial.with_name(partial.name + ".old")
    if folder.exists():
        os.replace(folder, retired)
    try:
        os.replace(partial, folder)
    except OSError:
        if retired.exists():
            os.replace(retired, folder)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def write_tensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: it cannot be written; the library itself says so in an error of its own.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written ({error})") from error


def _write_json(path: Path, value: object, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); hint: copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_token_ids(folder: Path, config: NeuralConfig) -> torch.Tensor | None:
    path, old = folder / VOCABULARY, folder / _OLD_VOCABULARY
    if old.exists():
        raise CheckpointError(
            f'{old}: expected {VOCABULARY} with {{"token_ids": […]}} in its place, since engines load every '
            "safetensors file of a folder as weights; hint: write its token_ids there as a list, and delete it"
        )
    if not path.exists():
        return None
    if isinstance(config, Eagle3Config):
        raise CheckpointError(
            f"{path}: an EAGLE-3 drafter's tokens are those of its d2t; hint: delete the file"
        )
    found = _read_json(path)
    ids = found.get("token_ids")
    if set(found) != {"token_ids"} or not _is_ascending(ids, config.vocab_size):
        raise CheckpointError(
            f'{path}: expected {{"token_ids": […]}}, ascending integers within 0…{config.vocab_size - 1}, '
            f"got {str(found)[:80]}"
        )
    return torch.tensor(ids)


def _is_ascending(ids: object, vocab_size: int) -> bool:
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        return False
    return all(a < b for a, b in pairwise([-1, *ids, vocab_size]))


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the drafter's weights, found no such file")
    try:
        with safe_open(path, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}); hint: copy it again"
        ) from error
