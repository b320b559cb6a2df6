"""`DrafterCheckpoint`: config, tensors and provenance in memory, format-free; atomic folders on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.checkpoint import zlab
from paceline.core.errors import CheckpointError, ConfigError, UnknownFormatError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
VOCABULARY = "draft_vocabulary.safetensors"
"""Beside z-lab's layout: the token ids worth drafting, so that a reader may cut the head; others use the whole head."""


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter at rest.

    Args:
        config: its shape.
        tensors: weights by the names of `zlab.manifest(config)`.
        provenance: where it comes from: recipe, data digest, counts, curve; free-form JSON.
        token_ids: (V',) int64 tokens worth drafting, ascending; `None` for all.
    """

    config: DrafterConfig
    tensors: dict[str, torch.Tensor]
    provenance: dict[str, Any] = field(default_factory=dict)
    token_ids: torch.Tensor | None = None

    @classmethod
    def load(cls, folder: Path) -> DrafterCheckpoint:
        """Returns the checkpoint stored in a z-lab folder.

        Raises:
            UnknownFormatError: no config.json there, or of another format.
            CheckpointError: weights missing, truncated, or not those of the config.
        """
        if not (folder / CONFIG).is_file():
            raise UnknownFormatError(
                f"{folder}: expected a drafter folder with {CONFIG} and {WEIGHTS}; found none"
            )
        try:
            config = zlab.config_from_json(_read_json(folder / CONFIG))
        except (ConfigError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / CONFIG}: {error}") from error
        tensors = _read(folder / WEIGHTS)
        zlab.check(config, tensors, str(folder / WEIGHTS))
        provenance = folder / PROVENANCE
        return cls(
            config,
            tensors,
            _read_json(provenance) if provenance.is_file() else {},
            _read_token_ids(folder / VOCABULARY, config.vocab_size),
        )

    def save(self, folder: Path) -> None:
        """Writes the folder so that a reader sees the old one or the new one, never a mixture.

        Raises:
            CheckpointError: the tensors are not those of the config.
            OSError: the disk is full or read-only; an earlier checkpoint stays as it was.
        """
        zlab.check(self.config, self.tensors, str(folder))
        with replaced_folder(folder) as partial:
            weights = {k: v.contiguous() for k, v in self.tensors.items()}
            write_tensors(weights, partial / WEIGHTS, {"format": "pt"})
            _write_json(partial / CONFIG, zlab.config_to_json(self.config, self.dtype))
            _write_json(partial / PROVENANCE, self.provenance)
            if self.token_ids is not None:
                write_tensors({"token_ids": self.token_ids.int()}, partial / VOCABULARY)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored weights."""
        return next(iter(self.tensors.values())).dtype

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> DFlash:
        """Returns the drafter module with these weights."""
        with torch.device("meta"):  # nothing to fill at random, no random numbers drawn
            drafter = DFlash(self.config)
        weights = {name: tensor.to(device, dtype, copy=True) for name, tensor in self.tensors.items()}
        drafter.load_state_dict(weights, assign=True)
        return drafter

    @classmethod
    def of(
        cls,
        drafter: NeuralDrafter,
        dtype: torch.dtype,
        provenance: dict[str, Any],
        token_ids: torch.Tensor | None = None,
    ) -> DrafterCheckpoint:
        """Returns a copy of a module's weights in `dtype`."""
        tensors = {k: v.detach().to("cpu", dtype, copy=True) for k, v in drafter.state_dict().items()}
        assert isinstance(drafter.config, DrafterConfig)
        return cls(drafter.config, tensors, provenance, token_ids)


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


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); hint: copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_token_ids(path: Path, vocab_size: int) -> torch.Tensor | None:
    if not path.exists():
        return None
    found = _read(path)
    ids = found.get("token_ids")
    if (
        ids is None
        or len(found) > 1
        or ids.ndim != 1
        or not len(ids)
        or ids.min() < 0
        or ids.max() >= vocab_size
    ):
        raise CheckpointError(
            f"{path}: expected one list token_ids within 0…{vocab_size - 1}, got {sorted(found)}"
        )
    return ids.long()


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
