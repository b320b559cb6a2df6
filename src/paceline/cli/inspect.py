"""`paceline inspect`: what a drafter or a target is, and whether two of them fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import diagnosis, options
from paceline.cli.decoding import open_pair
from paceline.cli.output import fields, write_json
from paceline.core.errors import ConfigError, IncompatiblePairError
from paceline.target.pull import DEFAULT_TARGET

if TYPE_CHECKING:
    from paceline.checkpoint.store import DrafterCheckpoint

app = typer.Typer()


@app.command()
def inspect(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME", help="A drafter folder, 'auto' for the one that ships, or a target."
        ),
    ],
    pair: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Check the drafter against this target.")
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option("--diagnose", help="Measure where its drafts fall on answers of the target, and why."),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts for --diagnose in place of those that ship."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Prompts that --diagnose has answered.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest answer of --diagnose.")
    ] = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what a drafter or a target is made of.

    With --pair, also whether the two fit; exit code 1 says that they do not. With --diagnose, what the drafter does on
    answers that the target writes: which slots fall, on which prompts, whether serving sees what training saw, and
    which known faults match. One to two minutes for the default pair.
    """
    amounts = {"num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    given = {key: value for key, value in amounts.items() if value is not None}
    if diagnose:
        diagnosis.run(name, pair, data, given, offline=offline, as_json=as_json)
        return
    if unused := [f"--{key.replace('_', '-')}" for key in [*given, *(["data"] if data else [])]]:
        raise ConfigError(f"{', '.join(unused)}: expected beside --diagnose; hint: add it")
    folder = _drafter_folder(name, pair or DEFAULT_TARGET)
    if folder is None and pair is not None:
        raise ConfigError(
            f"{name}: expected a drafter folder, since --pair was given; hint: name one, or auto"
        )
    found = _target(name, offline) if folder is None else _drafter(folder, pair, offline)
    if as_json:
        write_json(found)
    else:
        fields(_lines(found))
    if not found.get("pair", {"fits": True})["fits"]:
        raise typer.Exit(1)


def _drafter_folder(name: str, target: str) -> Path | None:
    """Returns the folder of the drafter that was meant, or `None` where `name` is a target."""
    if name == "auto":
        from paceline.llm import shipped_drafter

        shipped = shipped_drafter(target)
        if shipped is None:
            raise ConfigError(f"drafter: none ships for target {target!r}; hint: name a drafter folder")
        return shipped
    folder = Path(name).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        return None
    from paceline.checkpoint.store import ARCHITECTURES

    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{config}: expected a JSON object ({error}); hint: copy it again") from error
    return folder if architectures in [[known] for known in ARCHITECTURES] else None


def _target(name: str, offline: bool) -> dict[str, Any]:
    llm = open_pair(options.Pair(name, "none", offline=offline))
    spec = asdict(llm.target.spec)
    return {"kind": "target", "folder": str(llm.folder), "backend": llm.backend, "spec": spec}


def _drafter(folder: Path, pair: str | None, offline: bool) -> dict[str, Any]:
    from paceline.checkpoint.store import DrafterCheckpoint

    checkpoint = DrafterCheckpoint.load(folder)
    tensors, config = checkpoint.tensors, checkpoint.config
    ids = checkpoint.token_ids
    num_known = getattr(config, "draft_vocab_size", config.vocab_size)
    found = {
        "kind": "drafter",
        "folder": str(folder),
        "num_parameters": sum(t.numel() for t in tensors.values()),
        "num_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "num_draftable_tokens": num_known if ids is None else len(ids),
        "config": asdict(config),
        "tensors": {key: list(tensor.shape) for key, tensor in tensors.items()},
        "provenance": checkpoint.provenance,
    }
    return found if pair is None else {**found, "pair": _fit(checkpoint, pair, offline)}


def _fit(checkpoint: DrafterCheckpoint, target: str, offline: bool) -> dict[str, Any]:
    from paceline.llm import check_pair

    llm = open_pair(options.Pair(target, "none", offline=offline))
    try:
        check_pair(checkpoint, llm.target.spec)
    except IncompatiblePairError as error:
        return {"target": target, "fits": False, "reason": str(error)}
    return {"target": target, "fits": True, "reason": None}


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """Returns one line a fact, nested ones by their dotted names, long ones shortened."""
    lines: dict[str, str] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            lines.update({f"{key}.{inner}": _short(v) for inner, v in value.items()})
        else:
            lines[key] = f"{value:,}" if isinstance(value, int) else str(value)
    return lines


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, dict) or (len(text) > 100 and isinstance(value, list)):
        return f"({len(value)} entries; --json shows them)"
    return text
