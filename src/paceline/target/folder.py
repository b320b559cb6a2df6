"""What makes a local model folder whole: checks, and folders that appear complete or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.core.errors import CheckpointError

Progress = Callable[[str, int, int | None], None]
"""Told (stage, done, total); total is `None` where it is unknown."""

MANIFEST = "paceline.json"
MAX_HEADER_BYTES = 100 * 2**20


def check_folder(folder: Path) -> None:
    """Checks that a model folder has a readable config.json and whole safetensors files; reads headers only.

    Raises:
        CheckpointError: naming the file and what to do.
    """
    if not isinstance(read_json(folder / "config.json"), dict):
        raise CheckpointError(
            f"{folder / 'config.json'}: expected a JSON object; hint: fetch the model again"
        )
    for file in _weight_files(folder):
        check_safetensors(file)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder}: expected model.safetensors or model.safetensors.index.json, found {found}; "
        "hint: save the weights as safetensors"
    )


def check_safetensors(path: Path) -> None:
    """Checks that the file is as long as its header says, without reading the weights.

    Raises:
        CheckpointError: missing, not safetensors, or truncated.
    """
    hint = "hint: delete it and fetch it again"
    try:
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(8), "little")
            if num_header_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_header_bytes} bytes")
            header = json.loads(file.read(num_header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        num_expected_bytes = 8 + num_header_bytes + max(ends, default=0)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing; {hint}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file, or cut in its header ({error}); {hint}"
        ) from error
    num_bytes = path.stat().st_size
    if num_bytes != num_expected_bytes:
        raise CheckpointError(f"{path}: expected {num_expected_bytes} bytes, got {num_bytes}; {hint}")


def read_json(path: Path) -> Any:
    """Returns the JSON value in `path`, or raises `CheckpointError` naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error}); hint: fetch the model again"
        ) from error


def sha256_of(path: Path) -> str:
    """Returns the hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_fault(folder: Path) -> str | None:
    """Returns why a folder made by `build_folder` cannot be used, or `None` where it is whole.

    Sizes and headers are compared, not contents, so that every later start stays cheap.
    """
    if not folder.is_dir():
        return f"{folder} does not exist"
    try:
        for name, num_bytes in read_json(folder / MANIFEST)["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != num_bytes:
                return f"{path} is missing or not {num_bytes} bytes long"
        check_folder(folder)
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        return f"{folder / MANIFEST}: {error!r}" if not isinstance(error, CheckpointError) else str(error)
    return None


def build_folder(final: Path, fill: Callable[[Path, Path], dict[str, str]]) -> Path:
    """Returns `final`, made by `fill` unless a whole one is there already; it appears complete or not at all.

    Args:
        final: the folder to make. A damaged one is removed first.
        fill: called as `fill(model, scratch)` with two empty folders; writes the model into the first, may use the
            second as it likes, and returns where the model came from. What it raises passes through, and both
            folders are removed.

    Mutates: the disk. A lock beside `final` keeps a second process waiting instead of doing the same work.
    """
    if find_fault(final) is None:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f"{final.name}.lock"):
        if find_fault(final) is None:  # made by another process while this one waited
            return final
        staging = final.parent / f".{final.name}.partial"
        for leftover in (staging, final):
            shutil.rmtree(leftover, ignore_errors=True)
        model, scratch = staging / "model", staging / "scratch"
        try:
            for folder in (model, scratch):
                folder.mkdir(parents=True)
            source = fill(model, scratch)
            check_folder(model)
            _seal(model, source)
            model.rename(final)
            _sync(final.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


def _seal(model: Path, source: dict[str, str]) -> None:
    """Writes the manifest and flushes every file to the disk."""
    files = sorted(path for path in model.rglob("*") if path.is_file())
    manifest = {
        "source": source,
        "model_sha256": {path.name: sha256_of(path) for path in files if path.suffix == ".safetensors"},
        "files": {path.relative_to(model).as_posix(): path.stat().st_size for path in files},
        "versions": dict(_versions("paceline", "gguf", "safetensors", "torch")),
    }
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (*files, model / MANIFEST, model):
        _sync(path)


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # a source folder that was never installed
            yield package, "uninstalled"


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
