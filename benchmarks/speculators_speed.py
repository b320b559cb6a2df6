"""Training speed beside `speculators` 0.9.0: the same DFlash shape, the same cached features, the same machine.

    python benchmarks/speculators_speed.py --python OTHER/bin/python [--rounds 6] [--steps 2]

OTHER is an environment with `pip install speculators==0.9.0`. That package's own command stops on a machine without an
accelerator (its trainer moves the model to device 0); the error is stored. So its model, masks, loss, optimisers and
order of a step run from here on the CPU, in a process of their own: `DFlashDraftModel.from_training_args`, hard
cross-entropy with D-PACE, `build_optimizers` (AdamW and Muon each), gradients clipped at 1, float32 as ours, the `sdpa`
masks (its default needs a compiler for the accelerator). Both get documents of the same lengths, as many blocks of the
same size, the same layers, head rows and taps. Rounds alternate, so that both meet the same machine; the idle process
sleeps. Peak memory is the most that each process held.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB, HIDDEN, TAPS, HEAD, LAYERS, BLOCK = 49152, 576, (1, 8, 14, 20, 27), 12288, 2, 8
NUM_DOCUMENTS, PROMPT, ANSWER, ANCHORS = 4, 100, 130, 48  # of one step; ours draws from 64 such documents


def answer(serve: Callable[[], None]) -> None:
    """Runs a step for each line on stdin and says how long it took and how much memory the process has held."""
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        serve()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_mib": peak}), flush=True)


def serve_ours() -> None:
    """Trains with paceline's trainer, one step a line."""
    from paceline.train.config import OptimConfig
    from paceline.train.trainer import Trainer
    from train_speed import documents, drafter

    settings = OptimConfig(
        max_steps=1_000_000,
        blocks_per_step=NUM_DOCUMENTS * ANCHORS,
        anchors_per_document=ANCHORS,
        muon_block_rows=64,
        draft_vocab_size=HEAD,
        held_out_documents=1,
        eval_every=1_000_000,
        save_every=1_000_000,
    )
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.05
    lines = iter(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(drafter(), weight, weight, documents(64, PROMPT, ANSWER), settings, Path(folder))
        started = time.perf_counter()

        def observe(_: object) -> None:
            nonlocal started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(json.dumps({"seconds": time.perf_counter() - started, "peak_mib": peak}), flush=True)
            wait()
            started = time.perf_counter()

        def wait() -> None:
            if next(lines, None) is None:
                raise SystemExit

        print("ready", flush=True)
        wait()
        started = time.perf_counter()
        trainer.run(observe)


def serve_theirs(target: str, optimizer: str) -> None:
    """Trains with the other package's model, loss and optimisers, one step a line."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    torch.manual_seed(0)
    layers = create_transformer_layer_config(target, LAYERS, "qwen3", None, 2048, [])
    kept = torch.arange(HEAD)
    model = DFlashDraftModel.from_training_args(
        layers,
        t2d=torch.arange(VOCAB) < HEAD,
        d2t=torch.zeros_like(kept),
        verifier_name_or_path=target,
        draft_vocab_size=HEAD,
        block_size=BLOCK,
        mask_token_id=16,
        target_layer_ids=[i + 1 for i in TAPS],
        draft_attn_impl="sdpa",
    ).float()
    model.train()
    config = TrainerConfig(lr=1e-3, num_epochs=1, save_path="", optimizer=optimizer, muon_lr=1e-3)
    optimizers = build_optimizers(model, config)
    rng = torch.Generator().manual_seed(0)
    total = NUM_DOCUMENTS * (PROMPT + ANSWER)
    ids = torch.randint(0, HEAD, (1, total), generator=rng)
    hidden = torch.randn(1, total, HIDDEN * len(TAPS), generator=rng)
    last = torch.randn(1, total, HIDDEN, generator=rng)
    of = torch.arange(NUM_DOCUMENTS).repeat_interleave(PROMPT + ANSWER)[None]
    places = torch.arange(PROMPT + ANSWER).repeat(NUM_DOCUMENTS)[None]
    options = {
        "loss_config": resolve_loss_config("ce", "eager"),
        "max_anchors": NUM_DOCUMENTS * ANCHORS,
        "per_position_loss_weight": "dpace",
        "dpace_alpha": 0.5,
    }

    def step() -> None:
        _, loss, _ = model(hidden, ids, places >= PROMPT, last, of, places, **options)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()

    answer(step)


class Worker:
    """A process that makes a step when asked."""

    def __init__(self, python: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).resolve()), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while (line := self._read()) != "ready\n":  # libraries print as they load
            if not line:
                raise SystemExit(f"{' '.join(arguments)}: ended before it was ready")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def step(self) -> dict[str, Any]:
        """Makes one step and returns its seconds and the process's peak memory so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def own_command(python: str, target: str) -> str:
    """Returns the last line of what the other package's trainer says on this machine."""
    script = (
        "import torch; from speculators.train.trainer import Trainer, TrainerConfig\n"
        "Trainer(torch.nn.Linear(1, 1), TrainerConfig(lr=1e-3, num_epochs=1, save_path='none'), [])"
    )
    script = script.replace("torch.nn.Linear(1, 1)", "model")
    made = (
        "from speculators.models.dflash.core import DFlashDraftModel as M\n"
        "from speculators.train.cli import create_transformer_layer_config as c\n"
        f"model = M.from_training_args(c({target!r}, 1, 'qwen3', None, 2048, []), draft_vocab_size={VOCAB}, "
        f"verifier_name_or_path={target!r}, mask_token_id=16, target_layer_ids=[2], draft_attn_impl='sdpa')\n"
    )
    done = subprocess.run([python, "-c", made + script], capture_output=True, text=True, check=False)
    return "ran" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def main() -> None:
    """Compares, or serves a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="the other environment's interpreter")
    parser.add_argument(
        "--target", type=Path, help="the target's folder; by default the cached default target"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps of each in a round")
    parser.add_argument("--serve", choices=("ours", "muon", "adamw"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speculators_speed.json"))
    arguments = parser.parse_args()
    if arguments.serve == "ours":
        serve_ours()
    elif arguments.serve:
        serve_theirs(str(arguments.target), arguments.serve)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Runs both in turn and stores what came of it."""
    from paceline.engine.runtime import cache_dir, machine
    from paceline.target.pull import DEFAULT_TARGET, pull

    target = str(arguments.target or pull(DEFAULT_TARGET, cache_dir=cache_dir()))
    refused = own_command(arguments.python, target)
    workers = {"paceline": Worker(sys.executable, "--serve", "ours")}
    for optimizer in ("muon", "adamw"):
        name = f"speculators ({optimizer})"
        workers[name] = Worker(arguments.python, "--serve", optimizer, "--target", target)
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    peaks = dict.fromkeys(workers, 0)
    for worker in workers.values():
        worker.step()  # not counted: first steps allocate
    for index in range(arguments.rounds):
        for name in sorted(workers, reverse=bool(index % 2)):
            for _ in range(arguments.steps):
                found = workers[name].step()
                seconds[name].append(found["seconds"])
                peaks[name] = found["peak_mib"]
    for worker in workers.values():
        worker.close()
    blocks = NUM_DOCUMENTS * ANCHORS
    ours = [statistics.median(seconds["paceline"])]
    result = {
        "command": "python benchmarks/speculators_speed.py --python OTHER/bin/python",
        "date": time.strftime("%Y-%m-%d"),
        "environment": {**machine(), "num_threads": torch.get_num_threads()},
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "shape": f"{LAYERS} layers, block {BLOCK}, head {HEAD}, {len(TAPS)} cached taps, "
        f"{NUM_DOCUMENTS} documents of {PROMPT} + {ANSWER} tokens and {ANCHORS} anchors a step, float32",
        "speculators_own_trainer": refused,
        "rounds": arguments.rounds,
        "arms": {
            name: {
                "blocks_per_s": round(blocks / statistics.median(times), 1),
                "step_s": [round(t, 3) for t in times],
                "peak_resident_mib": peaks[name],
                "ours_is_faster": round(statistics.median(times) / ours[0], 2),
            }
            for name, times in seconds.items()
        },
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
