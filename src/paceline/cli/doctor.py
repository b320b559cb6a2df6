"""`paceline doctor`: what this machine has, what would be chosen on it, and what its arithmetic keeps."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer

from paceline import __version__
from paceline.cli import options
from paceline.cli.output import fields, loading_bar, say_warning, write_json
from paceline.core.errors import PacelineError
from paceline.target.pull import DEFAULT_TARGET

if TYPE_CHECKING:
    import torch

    from paceline.llm import LLM

app = typer.Typer()

PACKAGES = (
    "paceline",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "numpy",
    "typer",
    "rich",
)
PROBED = ("float32", "bfloat16")


@app.command()
def doctor(
    target: options.Target = DEFAULT_TARGET,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    probe: Annotated[
        bool, typer.Option(help="Measure whether a row's bits depend on the rows beside it.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Show versions, machine, choices, row invariance.

    Fetches nothing. "bit-exact" means that the speculative text is the plain one, token for token, whether chains or
    trees are drafted and whatever runs beside it; "equal up to near-ties" that two tokens of nearly equal probability
    may come out the other way round.
    """
    with loading_bar():
        report = examine(target, device, dtype, probe=probe)
    warnings = report["warnings"]
    if as_json:
        write_json(report)
    else:
        fields(_lines({key: value for key, value in report.items() if key != "warnings"}))
    for warning in warnings:
        say_warning(warning)


def examine(target: str, device: str, dtype: str, *, probe: bool) -> dict[str, Any]:
    """Returns the whole report as JSON data; what cannot be had is a warning in it."""
    from paceline.engine.runtime import choose_device, choose_dtype, machine
    from paceline.llm import shipped_drafter

    chosen_device = choose_device(device)
    chosen_dtype = _name(choose_dtype(dtype, chosen_device))
    environment = machine()
    threads = _threads(environment["num_threads"])
    report: dict[str, Any] = {
        "versions": {package: _version(package) for package in PACKAGES},
        "machine": environment,
        "threads": threads,
        "chosen": {"device": str(chosen_device), "dtype": chosen_dtype, "why": _why(dtype, chosen_device)},
        "cached_targets": _cached_targets(),
        "drafter": {"target": target, "ships": shipped_drafter(target) is not None},
        "warnings": _thread_warnings(threads),
    }
    dtypes = PROBED if probe else (chosen_dtype,)
    try:
        report |= _examine_target(target, device, dtypes, probe=probe)
    except PacelineError as error:
        report["warnings"].append(f"target {target} was not looked at: {error}")
    return report


def _examine_target(target: str, device: str, dtypes: tuple[str, ...], *, probe: bool) -> dict[str, Any]:
    from paceline.engine.runtime import probe_rows
    from paceline.llm import LLM

    found: dict[str, Any] = {}
    for dtype in dtypes:
        llm: LLM = LLM(target, None, device=device, dtype=dtype, offline=True)
        found.setdefault("target", {"name": target, "folder": str(llm.folder), "backend": llm.backend})
        if probe:
            rows = probe_rows(llm.target)
            found.setdefault("row_invariance", {})[dtype] = {
                "verdict": rows.verdict,
                "widths": rows.widths,
                "differing": rows.differing,
                "trees": rows.trees,
                "batches": rows.batches,
            }
    return found


def _version(package: str) -> str:
    if package == "paceline":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why(dtype: str, device: torch.device) -> str:
    if dtype != "auto":
        return "asked for"
    if device.type != "cpu":
        return "an accelerator multiplies bfloat16 fastest"
    from paceline.engine.runtime import has_fast_bfloat16

    has = (
        "multiplies bfloat16 itself" if has_fast_bfloat16() else "has no bfloat16 products, float32 is faster"
    )
    return f"no accelerator is used; this processor {has}"


def _threads(num_threads: object) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "num_threads": num_threads,
        "num_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
    }


def _thread_warnings(threads: dict[str, Any]) -> list[str]:
    asked, cores = threads["OMP_NUM_THREADS"], threads["num_cores"]
    if asked is not None and not asked.strip().isdecimal():
        return [f"OMP_NUM_THREADS: expected a number of threads, got {asked!r}"]
    if asked is not None and int(asked) > cores:
        return [
            f"OMP_NUM_THREADS={asked} is more than the {cores} cores this process may use, which slows it down"
        ]
    return []


def _cached_targets() -> list[str]:
    from paceline.engine.runtime import cache_dir

    folder = (cache_dir() or Path(platformdirs.user_cache_dir("paceline"))) / "targets"
    return sorted(path.name for path in folder.glob("*/") if not path.name.startswith("."))


def _lines(report: dict[str, Any]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for key, value in report.items():
        if isinstance(value, dict):
            lines.update({f"{key}.{name}": _text(item) for name, item in value.items()})
        else:
            lines[key] = _text(value)
    return lines


def _text(value: object) -> str:
    if isinstance(value, dict):
        differing = ", ".join(map(str, value["differing"]))
        return str(value["verdict"]) + (f" (chains of {differing} rows differ)" if differing else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)
