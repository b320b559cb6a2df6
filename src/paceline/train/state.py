"""A training state on disk: one file, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import CheckpointError


def write_state(state: dict[str, Any], path: Path) -> None:
    """Writes a state atomically; an interrupted or failed write leaves the one before.

    Raises:
        OSError: it could not be written, as on a full disk.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as RuntimeError
        kept = "the state saved before it is whole" if path.exists() else "nothing was saved before it"
        raise OSError(
            f"{path}: could not be written ({error}); {kept}; hint: free some space and resume"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """Returns a state with its tensors on the CPU, since a run may go on with another device; `None` without a file.

    Raises:
        CheckpointError: the file is truncated.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a whole training state ({error}); hint: delete it to begin anew"
        ) from error
    return state
