"""What a drafter becomes: families, depths, blocks, objectives and amounts of data, at equal arithmetic.

    python benchmarks/study.py run FOLDER [--arms NAME …] [--blocks 40000]     trains, and stores what came of it
    python benchmarks/study.py write                                           rewrites the study in docs/training.md

Every arm is a recipe of recipes/ with a few keys changed, trained from the target's own layers on the same answers
with as many floating-point operations as every other arm: the operations of an optimiser step (forward, backward,
update) are counted, not timed, so the budget means the same on any machine and beside any other work. The number of
steps follows, and the learning rate falls to zero over the last third. τ is greedy and teacher-forced on answers that
no arm has seen, at the end of the run. An interrupted arm goes on where it stopped. FOLDER/ARM/drafter decodes.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.engine.runtime import machine
from paceline.train.config import OptimConfig, TrainConfig
from paceline.train.data.documents import collect
from paceline.train.data.features import Document
from paceline.train.run import Setup, Weights, write_outputs
from paceline.train.shape import drafter_config
from paceline.train.trainer import Progress, Trainer

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
RESULT = ROOT / "benchmarks" / "results" / "study.json"
DOCUMENT, FIGURE = ROOT / "docs" / "training.md", ROOT / "docs" / "study.svg"
NUM_PROMPTS, NUM_EVALUATIONS = 1024, 5
_BLOCK = re.compile(r"(<!-- begin:generated study -->\n)(.*?)(<!-- end:generated study -->)", re.DOTALL)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        name, title: for files, for readers.
        changes: recipe overrides.
        num_prompts: answers it gets, those held out included.
        budget: its share of the operations that a whole arm gets.
        recipe: what is changed.
    """

    name: str
    title: str
    changes: tuple[str, ...] = ()
    num_prompts: int = NUM_PROMPTS
    budget: float = 1.0
    recipe: str = "smollm2-135m.toml"


def _layers(count: int) -> tuple[str, ...]:
    last = [30 - count + i for i in range(count)]
    return f"drafter.num_layers={count}", f"drafter.initial_layers={last}"


_LONG = ("drafter.block_size=16", "train.slots=[4, 4, 8, 16]")
_BASE = (f"data.max_prompts={NUM_PROMPTS}", "regenerate.top_log_probs=16")
_SAME = ("drafter.block_size=8", "drafter.target_layer_ids=[1, 8, 14, 20, 27]", "train.slots=[4, 4, 6, 8]")
GROUPS = {
    "depth and block": (
        Arm("base", "DFlash, 2 layers, block 8", _layers(2)),
        Arm("layers-1", "1 layer", _layers(1)),
        Arm("layers-4", "4 layers", _layers(4)),
        Arm("block-16", "block 16", (*_layers(2), *_LONG)),
        Arm("layers-1-block-16", "1 layer, block 16", (*_layers(1), *_LONG)),
        Arm("layers-4-block-16", "4 layers, block 16", (*_layers(4), *_LONG)),
    ),
    "family": (
        Arm(
            "dflash2",
            "DFlash 2, 2 layers",
            (*_layers(2), 'drafter.algorithm="dflash2"', "drafter.selector_rank=64"),
        ),
        Arm("eagle3", "EAGLE-3", _SAME, recipe="smollm2-135m-eagle3.toml"),
    ),
    "objective": (
        Arm("exponential", "fixed exponential weights", (*_layers(2), 'train.loss="exponential"')),
        Arm("uniform", "equal weights", (*_layers(2), 'train.loss="uniform"')),
        Arm(
            "distribution",
            "the target's 16 likeliest tokens as label",
            (*_layers(2), 'train.labels="distribution"'),
        ),
        Arm("decay", "weight decay 0.1", (*_layers(2), "train.weight_decay=0.1")),
    ),
    "data and compute": (
        Arm("half-data", "half the answers", _layers(2), num_prompts=NUM_PROMPTS // 2),
        Arm("quarter-data", "a quarter of the answers", _layers(2), num_prompts=NUM_PROMPTS // 4),
        Arm("half-compute", "half the operations", _layers(2), budget=0.5),
        Arm("double-compute", "twice the operations", _layers(2), budget=2.0),
    ),
}
ARMS = {arm.name: arm for arms in GROUPS.values() for arm in arms}


# Training ------------------------------------------------------------------------------------------------------------


def recipe_of(arm: Arm, overrides: Sequence[str]) -> TrainConfig:
    """Returns an arm's recipe, its length not yet set."""
    return TrainConfig.from_toml(RECIPES / arm.recipe, [*_BASE, *arm.changes, *overrides])


def operations(setup: Setup, weights: Weights, documents: list[Document], folder: Path) -> float:
    """Returns the floating-point operations of a block of the recipe: of whole steps, over all its block lengths."""
    settings = setup.recipe.train
    lengths = settings.slots or (setup.shape.block_size,)
    counted = {slots: _step_operations(setup, weights, documents, folder, slots) for slots in set(lengths)}
    return sum(counted[slots] for slots in lengths) / len(lengths) / settings.blocks_per_step


def _step_operations(
    setup: Setup, weights: Weights, documents: list[Document], folder: Path, slots: int
) -> float:
    far = 1_000_000
    settings = replace(
        setup.recipe.train,
        slots=(slots,),
        held_out_documents=1,
        max_steps=far,
        eval_every=far,
        save_every=far,
    )
    counter = FlopCounterMode(display=False)
    num_steps = 0

    def observe(_: Progress) -> None:  # told behind each step: the second one is counted
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            counter.__enter__()
        elif num_steps == 2:
            counter.__exit__(None, None, None)

    short = replace(setup, recipe=replace(setup.recipe, train=settings))
    short.new_trainer(weights, documents[:65], folder / "counted").run(observe, lambda: num_steps == 2)
    (folder / "counted" / "state.pt").unlink()
    return float(counter.get_total_flops())


def sized(settings: OptimConfig, num_blocks: int) -> OptimConfig:
    """Returns settings of the length of so many blocks."""
    steps = max(NUM_EVALUATIONS, round(num_blocks / settings.blocks_per_step))
    return replace(
        settings,
        max_steps=steps,
        decay_steps=steps // 3,
        eval_every=-(-steps // NUM_EVALUATIONS),
        save_every=-(-steps // NUM_EVALUATIONS),
    )


def run(folder: Path, names: Sequence[str], num_blocks: int, overrides: Sequence[str]) -> None:
    """Trains arms and stores each as soon as it is done."""
    base = Setup.open(recipe_of(ARMS["base"], overrides))
    target = base.load_target()
    weights = base.weights_of(target)
    documents = collect(base.prompts, target, base.shape.target_layer_ids, folder / "features", base.recipe)
    del target
    budget = num_blocks * operations(base, weights, documents, folder)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    for name in names:
        arm = ARMS[name]
        recipe = recipe_of(arm, overrides)
        setup = replace(base, recipe=recipe, shape=drafter_config(recipe, base.folder))
        per_block = operations(setup, weights, documents, folder)
        recipe = replace(recipe, train=sized(recipe.train, round(arm.budget * budget / per_block)))
        setup = replace(setup, recipe=recipe)
        trainer = setup.new_trainer(weights, documents[: arm.num_prompts], folder / name)
        trainer.resume()
        trainer.run(should_stop=lambda: bool(stopped))
        if stopped:
            print(f"{name}: stopped at step {trainer.step}; the same command goes on")
            return
        store(arm, setup, trainer, documents[: arm.num_prompts], per_block, num_blocks)
        said = {"algorithm": recipe.drafter.algorithm, "target": recipe.target, "recipe": recipe.portable()}
        write_outputs(trainer, folder / name, partial(_said, said))  # a drafter for `paceline bench`


def _said(provenance: dict[str, Any], _: Trainer) -> dict[str, Any]:
    return provenance


def store(
    arm: Arm, setup: Setup, trainer: Trainer, documents: list[Document], per_block: float, num_blocks: int
) -> None:
    """Adds an arm to the stored result, in place of an earlier one of that name."""
    known = stored()
    row, held_out = trainer.curve[-1], setup.recipe.train.held_out_documents
    found = {
        "title": arm.title,
        "recipe": arm.recipe,
        "changes": list(arm.changes),
        "date": time.strftime("%Y-%m-%d"),
        "environment": {**machine(), "num_threads": torch.get_num_threads()},
        "num_parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "num_answer_tokens": sum(d.num_supervised for d in documents[held_out:]),
        "operations_per_block": round(per_block),
        "num_operations": round(per_block * row.num_blocks),
        "num_steps": row.step,
        "num_blocks": row.num_blocks,
        "seconds": round(row.seconds),
        "acceptance_length": round(row.acceptance_length, 4),
        "held_out_loss": round(row.held_out_loss, 4),
        "train_loss": round(row.train_loss, 4),
        "slot_accuracy": [round(x, 4) for x in row.slot_accuracy],
        "curve": [
            [r.num_blocks, round(r.acceptance_length, 4), round(r.held_out_loss, 4)] for r in trainer.curve
        ],
    }
    ordered = {name: found if name == arm.name else known["arms"].get(name) for name in ARMS}
    result = {
        "command": f"python benchmarks/study.py run FOLDER --blocks {num_blocks}",
        "arms": {name: each for name, each in ordered.items() if each is not None},
    }
    unfinished = RESULT.with_suffix(".partial")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(RESULT)
    print(
        f"{arm.name}: τ {row.acceptance_length:.3f} after {row.num_blocks:,} blocks, {row.seconds:.0f} s",
        flush=True,
    )


# Reading -------------------------------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """Returns the stored result; one without arms where nothing was measured yet."""
    result: dict[str, Any] = {"arms": {}}
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else result


def table(result: dict[str, Any]) -> str:
    """Returns the study as Markdown."""
    arms = result["arms"]
    if not arms:
        return "Not measured yet: `python benchmarks/study.py run FOLDER` measures, and `write` writes this table.\n"
    lines = [
        "| arm | τ | slot 1 | slot 2 | slot 3 | parameters | answer tokens | blocks | operations |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group, members in GROUPS.items():
        there = [arm for arm in members if arm.name in arms]
        if there:
            lines.append(f"| *{group}* |" + " |" * 8)
        for arm in there:
            found = arms[arm.name]
            slots = [f"{100 * share:.0f} %" for share in found["slot_accuracy"][:3]]
            cells = (
                found["title"],
                f"{found['acceptance_length']:.2f}",
                *slots,
                f"{found['num_parameters'] / 1e6:.1f} M",
                f"{found['num_answer_tokens']:,}",
                f"{found['num_blocks']:,}",
                f"{found['num_operations'] / 1e12:.0f} T",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [*lines, "", f"`{result['command']}`; benchmarks/results/study.json has the curves.", ""]
    )


def draw(result: dict[str, Any]) -> None:
    """Writes the curves of all arms, a panel a group."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(2, 2, sharey=True).flatten()
    for axes, (group, members) in zip(panels, GROUPS.items(), strict=True):
        for arm in ({ARMS["base"]} | set(members)) & {ARMS[name] for name in result["arms"]}:
            found = result["arms"][arm.name]
            operations = [n * found["operations_per_block"] / 1e12 for n, _, _ in found["curve"]]
            axes.plot(operations, [tau for _, tau, _ in found["curve"]], label=found["title"])
        axes.set_title(group)
        axes.set_xlabel("tera-operations of training")
        axes.set_ylabel("τ on held-out answers")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(FIGURE, metadata={"Date": None})


def write() -> None:
    """Rewrites the study in docs/training.md and its figure."""
    result = stored()
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(_BLOCK.sub(lambda m: m[1] + table(result) + m[3], text), encoding="utf-8")
    if result["arms"]:
        draw(result)


def main() -> None:
    """Runs or writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    runs.add_argument(
        "--blocks", type=int, default=40_000, help="of the first arm; others by their operations"
    )
    runs.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe of all arms"
    )
    commands.add_parser("write")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write()
    else:
        run(arguments.folder, arguments.arms, arguments.blocks, arguments.set)


if __name__ == "__main__":
    main()
