"""Processes that share every step: what they come to together is what one would have come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.parallel import Ranks, micro_batches
from parallel_job import RUNS, make_spare, result, start
from tiny_trainer import make_documents, make_trainer

PROGRAM = Path(__file__).with_name("parallel_job.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of two processes' runs, and what each of them found."""
    folder = tmp_path_factory.mktemp("together")
    done = subprocess.run(
        [*LAUNCH, PROGRAM, folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, results = tmp_path_factory.mktemp("alone"), {}
    for name in RUNS:
        trainer = start(name, folder, Ranks())
        trainer.run()
        results[name] = result(trainer)
    return results


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert len(found["rows"]) == len(expected["rows"])
    for a, b in zip(found["rows"], expected["rows"], strict=True):
        assert a[:3] == pytest.approx(b[:3], rel=1e-12)
        assert a[3] == pytest.approx(b[3], rel=1e-9)
    assert found["accuracy"] == expected["accuracy"]
    assert found["best"] == expected["best"]
    for name, tensor in found["weights"].items():
        torch.testing.assert_close(tensor, expected["weights"][name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(
    together: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any], name: str
) -> None:
    for rank, found in enumerate(together[1]):
        assert found["place"] == (rank, 2)
        assert_close(found["runs"][name], alone[name])
    first, second = (found["runs"][name] for found in together[1])
    assert first["losses"] == second["losses"]
    assert all(torch.equal(first["weights"][n], second["weights"][n]) for n in first["weights"])


def test_a_matrix_without_a_gradient_does_not_decay(together: tuple[Path, list[dict[str, Any]]]) -> None:
    untouched = make_spare().state_dict()["spare.weight"].double()
    for found in together[1]:
        assert torch.equal(found["runs"]["a matrix that nobody uses"]["weights"]["spare.weight"], untouched)


def test_one_process_stops_all_and_all_resume(
    together: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for found in together[1]:
        assert_close(found["resumed"], alone["plain"])


def test_what_two_began_one_may_finish(
    together: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    trainer = start("plain", together[0] / "stopped", Ranks())
    assert trainer.resume(), "one of them wrote the state"
    assert_close(result(trainer), alone["plain"])


def test_processes_that_were_given_different_things_say_so(
    together: tuple[Path, list[dict[str, Any]]],
) -> None:
    for found in together[1]:
        assert "processes of one run differ in documents: [9, 10]; hint" in found["said"]


# Alone ---------------------------------------------------------------------------------------------------------------


def test_without_torchrun_a_process_is_alone() -> None:
    ranks = Ranks.join()
    assert ranks == Ranks(0, 1)
    numbers = torch.ones(3)
    ranks.sum_([numbers])
    assert torch.equal(numbers, torch.ones(3))
    assert ranks.is_first
    assert ranks.any(True, numbers)
    assert not ranks.any(False, numbers)


def test_every_item_is_in_one_share() -> None:
    for count in range(6):
        shares = [Ranks(rank, 3).share(list(range(count))) for rank in range(3)]
        assert sorted(item for share in shares for item in share) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_micro_batches_are_the_batch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, documents=make_documents(9))
    batch, _ = trainer._sampler.next(trainer.cursor, 0, 3)
    assert [len(part.documents) for part in micro_batches(batch, 2)] == [1, 2]
    for count in (1, 2, 3, 7):
        parts = micro_batches(batch, count)
        assert len(parts) == min(count, 3)
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
        assert [d for part in parts for d in part.documents] == batch.documents
        assert all(part.num_blocks == sum(len(d.anchors) for d in part.documents) for part in parts)
