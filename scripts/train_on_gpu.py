"""Trains a drafter within a time limit on a machine that has a GPU and PyTorch but no network.

    python scripts/train_on_gpu.py prepare KIT               here: target, prompts and small packages in one folder
    python scripts/train_on_gpu.py run KIT OUT --minutes 9   there, beside this repository: answers, training, weights
    python scripts/train_on_gpu.py join OUT DRAFTER          here: what came back becomes a drafter folder

There, Python needs torch, transformers and safetensors; nothing is installed. What goes there and what comes back is
cut into parts that small transfers take. About every minute OUT is brought up to date, so a run cut short, by SIGTERM
or by SIGKILL, leaves whole weights; the same command goes on with it where --work still holds the run.

The steps of a run follow from its time: some are made and timed, then max_steps is fixed, so that the learning rate
has come to zero in time. The drafter's provenance holds the recipe with these numbers: it is the recipe of this run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # there, nothing is installed

import torch  # noqa: E402

from paceline.checkpoint.store import DrafterCheckpoint, replaced_folder  # noqa: E402
from paceline.core.errors import CheckpointError, ConfigError, PacelineError  # noqa: E402
from paceline.engine.runtime import choose_device  # noqa: E402
from paceline.train.config import TrainConfig  # noqa: E402

if TYPE_CHECKING:
    from paceline.train.run import TrainEvent  # needs what only the kit may hold

RECIPE = ROOT / "recipes" / "smollm2-135m-gpu.toml"
PACKAGES = ("gguf", "platformdirs", "filelock")
"""Pure Python, needed to read the target, and not among what torch and transformers bring everywhere."""

KIT, WEIGHTS, LOG, CURVE = "kit.json", "drafter.json", "log.txt", "curve.csv"
KIT_PART_BYTES, WEIGHT_PART_BYTES = 50_000_000, 16_000_000

ANSWERS_SHARE = 0.45
"""Share of the time after which no further answers are made."""
PLANNED_SHARE = 0.9
"""Share of the time by which the last step is planned; starting and writing take the rest."""
LAST_SHARE = 0.97
"""Share of the time after which training stops where it is."""
TIMED_STEPS, SKIPPED_STEPS = 30, 20
"""Steps made to time a step, and how many of them are not timed: the first allocate memory and choose kernels."""
CHECKPOINT_S = 60.0

log = logging.getLogger("train_on_gpu")


# Parts ---------------------------------------------------------------------------------------------------------------


def write_parts(data: bytes, folder: Path, stem: str, part_bytes: int) -> dict[str, Any]:
    """Writes bytes as `stem.part0`, `stem.part1`, … and returns what `read_parts` needs to know of them."""
    names: list[str] = []
    for start in range(0, len(data), part_bytes):
        names.append(f"{stem}.part{len(names)}")
        (folder / names[-1]).write_bytes(data[start : start + part_bytes])
    return {"parts": names, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_parts(folder: Path, said: dict[str, Any]) -> bytes:
    """Returns the bytes of parts, checked.

    Raises:
        CheckpointError: parts missing, or not the bytes that were cut.
    """
    names = said["parts"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: parts missing: {', '.join(missing)}; hint: copy them there too")
    data = b"".join((folder / name).read_bytes() for name in names)
    if hashlib.sha256(data).hexdigest() != said["sha256"]:
        raise CheckpointError(
            f"{folder}: expected {said['num_bytes']} bytes of sha256 {said['sha256']}, got {len(data)} others; "
            "hint: copy the parts again"
        )
    return data


def read_description(path: Path) -> dict[str, Any]:
    """Returns the JSON of `KIT` or `WEIGHTS`."""
    if not path.is_file():
        raise CheckpointError(f"{path}: not there; hint: name the folder that holds it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_description(path: Path, value: object) -> None:
    """Writes JSON atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


# Here, before --------------------------------------------------------------------------------------------------------


def prepare(kit: Path, recipe: Path, gguf: Path | None) -> None:
    """Fills the folder `kit` with all that `run` needs beside this repository."""
    config = TrainConfig.from_toml(recipe)
    if kit.exists() and any(kit.iterdir()):
        raise ConfigError(f"{kit}: expected an empty folder, or none; hint: another one")
    (kit / "data").mkdir(parents=True)
    for file in sorted({source.file for source in config.data.sources}):
        shutil.copyfile(Path(config.data.folder) / file, kit / "data" / Path(file).name)
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None, package
        shutil.copytree(
            Path(spec.origin).parent, kit / "site" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    from paceline.target.pull import fetch_gguf

    with tempfile.TemporaryDirectory() as scratch:
        data = (gguf or fetch_gguf(config.target, Path(scratch))).read_bytes()
    target = write_parts(data, kit, "target.gguf", KIT_PART_BYTES)
    write_description(kit / KIT, {"target": target})
    log.info("%s: %s, data, site, %s", kit, ", ".join(target["parts"]), KIT)


# There ---------------------------------------------------------------------------------------------------------------


class TimedRun:
    """A recipe's run that ends in time.

    Args:
        config: the recipe; its `max_steps` is a limit, its ratio of `decay_steps` to `max_steps` the schedule's shape.
        target: folder of the target.
        out: where weights, curve and log go.
        started: monotonic time at which the clock began.
        limit_s: seconds from then.
    """

    def __init__(self, config: TrainConfig, target: Path, out: Path, started: float, limit_s: float) -> None:
        self.config, self.out = config, out
        self._target, self._started, self._limit_s = target, started, limit_s
        self._told_to_stop = False
        self._until = self._at(ANSWERS_SHARE)
        self._shard_began = time.monotonic()
        self._step_times: dict[int, float] = {}

    def _at(self, share: float) -> float:
        return self._started + share * self._limit_s

    def stop(self, *_: object) -> None:
        """Asks for an end behind the current step. A signal handler."""
        self._told_to_stop = True

    def run(self) -> bool:
        """Makes answers, times a few steps, then trains to the planned end; returns whether that was reached.

        Raises:
            KeyboardInterrupt: told to stop before there were weights.
        """
        self._make_answers()
        self._export()
        if self._told_to_stop or len(self._step_times) < TIMED_STEPS:
            return False
        self._plan()
        try:
            return self._train()
        except KeyboardInterrupt:  # while it read the answers again
            return False
        finally:
            self._export()

    def _make_answers(self) -> None:
        """Has the target answer as many prompts as there is time for, and makes the steps to be timed."""
        step = _step_of(Path(self.config.out) / "state.pt")
        planned = replace(self.config.train, max_steps=step + TIMED_STEPS, decay_steps=0)
        final = self.config.train
        self.config = replace(
            self.config, train=replace(planned, eval_every=TIMED_STEPS, save_every=TIMED_STEPS)
        )
        try:
            self._train()
        except KeyboardInterrupt:
            if self._told_to_stop:
                raise
            size = self.config.regenerate.prompts_per_shard
            num_prompts = size * len(list((Path(self.config.out) / "features").glob("*.safetensors")))
            if not num_prompts:
                raise ConfigError(
                    f"no {size} answers were ready after {ANSWERS_SHARE:.0%} of the time; hint: more --minutes, or a "
                    "smaller regenerate.prompts_per_shard"
                ) from None
            log.info("answers to %d prompts: there is no time for more", num_prompts)
            self.config = replace(self.config, data=replace(self.config.data, max_prompts=num_prompts))
            self._until = self._at(LAST_SHARE)
            self._train()
        self.config = replace(self.config, train=final)

    def _plan(self) -> None:
        """Fixes the length of the run from the time that its latest steps took."""
        steps = sorted(self._step_times)[SKIPPED_STEPS:]
        step_s = (self._step_times[steps[-1]] - self._step_times[steps[0]]) / max(1, steps[-1] - steps[0])
        left_s = max(0.0, self._at(PLANNED_SHARE) - time.monotonic())
        recipe = self.config.train
        max_steps = min(recipe.max_steps, steps[-1] + max(1, int(left_s / max(step_s, 1e-6))))
        every = max(1, round(CHECKPOINT_S / max(step_s, 1e-3)))
        settings = replace(
            recipe,
            max_steps=max_steps,
            decay_steps=max_steps * recipe.decay_steps // recipe.max_steps,
            eval_every=every,
            save_every=every,
        )
        self.config = replace(self.config, train=settings)
        rate = recipe.blocks_per_step / step_s if step_s else 0.0
        log.info("a step takes %.3f s (%.0f blocks/s): %d steps", step_s, rate, max_steps)

    def _train(self) -> bool:
        from paceline.train.run import train

        self._shard_began = time.monotonic()
        result = train(
            self.config, observe=self._observe, should_stop=self._should_stop, target_folder=self._target
        )
        log.info("step %d: tau %.3f", result.row.step, result.row.acceptance_length)
        return result.finished

    def _should_stop(self) -> bool:
        return self._told_to_stop or time.monotonic() >= self._until

    def _observe(self, event: TrainEvent) -> None:
        now = time.monotonic()
        if event.stage == "train":
            self._step_times[event.done] = now
            row = None if event.detail is None or isinstance(event.detail, int) else event.detail.row
            if row is not None and event.done < event.total:
                log.info("step %d of %d: tau %.3f", row.step, event.total, row.acceptance_length)
                self._export()
        elif event.detail is None:
            log.info("answers: %d of %d shards", event.done, event.total)
            if event.done == event.total:
                self._until = self._at(LAST_SHARE)
            elif now + (now - self._shard_began) > self._at(ANSWERS_SHARE):
                self._until = now  # another shard would not be ready in time
            self._shard_began = now

    def _export(self) -> None:
        """Brings `out` up to date: at every moment its description names whole parts of one drafter."""
        folder = Path(self.config.out)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path in sorted((folder / "drafter").iterdir()):
                archive.add(path, path.name)
        data = buffer.getvalue()
        stem = f"drafter-{hashlib.sha256(data).hexdigest()[:8]}.tar"
        described = write_parts(data, self.out, stem, WEIGHT_PART_BYTES)
        write_description(self.out / WEIGHTS, {"drafter": described})
        for part in self.out.glob("drafter-*.part*"):
            if not part.name.startswith(stem):
                part.unlink()
        shutil.copyfile(folder / "curve.csv", self.out / CURVE)


def _step_of(state: Path) -> int:
    return int(torch.load(state, map_location="cpu", weights_only=True)["step"]) if state.is_file() else 0


def unpack_target(kit: Path, work: Path) -> Path:
    """Returns the folder of the kit's target, converted once."""
    from paceline.target.folder import build_folder
    from paceline.target.gguf import convert_gguf

    said = read_description(kit / KIT)["target"]

    def fill(model: Path, scratch: Path) -> dict[str, str]:
        gguf = scratch / "target.gguf"
        gguf.write_bytes(read_parts(kit, said))
        convert_gguf(gguf, model, lambda stage, done, total: None)
        return {"gguf_sha256": str(said["sha256"])}

    return build_folder(work / f"target-{str(said['sha256'])[:16]}", fill)


def run(kit: Path, out: Path, recipe: Path, work: Path, minutes: float) -> bool:
    """Trains within `minutes` and returns whether the run came to its planned end."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    log.addHandler(logging.FileHandler(out / LOG, encoding="utf-8"))
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    sys.path.append(str(kit / "site"))  # at the end: what the machine has comes first
    device = choose_device("auto")
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")
    log.info("%s, %.1f minutes", device, minutes)
    config = TrainConfig.from_toml(recipe)
    sources = tuple(replace(source, file=Path(source.file).name) for source in config.data.sources)
    config = replace(
        config,
        out=str(work / "run"),
        data=replace(config.data, folder=str(kit / "data"), sources=sources),
    )
    timed = TimedRun(config, unpack_target(kit, work), out, started, 60 * minutes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, timed.stop)
    return timed.run()


# Here, after ---------------------------------------------------------------------------------------------------------


def join(out: Path, drafter: Path) -> None:
    """Writes the drafter folder that `out` holds in parts, and checks it."""
    data = read_parts(out, read_description(out / WEIGHTS)["drafter"])
    with replaced_folder(drafter) as partial:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(partial, filter="data")
        said = DrafterCheckpoint.load(partial).provenance
    log.info("%s: %d steps, tau %.3f", drafter, said["num_steps"], said["held_out"]["acceptance_length"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 1 for a failure or a run that was cut short."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="fill KIT with all that `run` needs")
    preparing.add_argument("kit", type=Path)
    preparing.add_argument("--recipe", type=Path, default=RECIPE)
    preparing.add_argument("--gguf", type=Path, help="the target, where it is not the built-in one")
    running = commands.add_parser("run", help="train in time")
    running.add_argument("kit", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--recipe", type=Path, default=RECIPE)
    running.add_argument("--minutes", type=float, default=9.0)
    running.add_argument("--work", type=Path, help="answers and state, some GB (KIT/work)")
    joining = commands.add_parser("join", help="make a drafter folder of what `run` left in OUT")
    joining.add_argument("out", type=Path)
    joining.add_argument("drafter", type=Path)
    given = parser.parse_args(arguments)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    try:
        if given.command == "prepare":
            prepare(given.kit, given.recipe, given.gguf)
        elif given.command == "join":
            join(given.out, given.drafter)
        elif not run(given.kit, given.out, given.recipe, given.work or given.kit / "work", given.minutes):
            log.info("cut short: the weights are whole, but the learning rate had not come to zero")
            return 1
    except (PacelineError, OSError) as error:
        log.error("error: %s", error)
        return 1
    except KeyboardInterrupt:
        log.error("stopped before there were weights; the same command goes on")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
