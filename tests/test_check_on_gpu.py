"""scripts/check_on_gpu.py with tiny shapes on the CPU: every part, and that it tells right from wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_on_gpu.py"


def load_script() -> Any:
    """Returns the script as a module."""
    spec = importlib.util.spec_from_file_location("check_on_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_on_gpu"] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    status = script.main([str(out), "--tiny"])
    found = json.loads(out.read_text())
    assert found["left_out"] == [] and list(found["seconds"]) == list(script.PARTS)
    for name in ("float32 plain", "float32 plain recorded", "float32 dflash", "float32 dflash recorded"):
        assert found["parity"][name]["num_equal_texts"] == 3, name
    assert status == (0 if all(row["near_ties_only"] for row in found["parity"].values()) else 1)

    speeds = {(row["batch"], row["plain"], row["recorded"]): row for row in found["pair"]}
    assert set(speeds) == {(b, p, r) for b in (1, 3) for p in (True, False) for r in (True, False)}
    assert all(row["tokens_per_s"] > 0 and row["tau"] >= 1 for row in found["pair"])
    assert all((row["num_recorded"] > 0) is row["recorded"] for row in found["pair"])

    points = {(row["recorded"], row["batch"], row["rows"]) for row in found["passes"]["verify_s"]}
    assert points == {(True, b, r) for b in (1, 4) for r in (1, 4)} | {
        (False, b, r) for b in (1, 4) for r in (1, 6)
    }
    assert len(found["passes"]["draft_s"]) == 4
    for row in found["steps"]:
        assert row["break_even_tau"] == pytest.approx(row["dflash_s"] / row["plain_s"])
        for published in row["published"]:
            assert published["speedup"] == pytest.approx(published["tau"] / row["break_even_tau"])
    assert [row["batch"] for row in found["steps"]] == [1, 4]
    assert any("s" in row for row in found["attention"])


def test_no_time_is_said(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert script.main([str(out), "--tiny", "--minutes", "0"]) == 0
    assert json.loads(out.read_text())["left_out"] == list(script.PARTS)


def test_texts_of_another_target_are_told_apart() -> None:
    check = script.new_check(None, script.DRAFTER)
    pair = check.load(check.device, torch.float32)
    other = script.random_pair(script.TINY, check.device, torch.float32, seed=5)
    expected, texts = (p.decode(check.prompts, 8, plain=True, batch=3) for p in (pair, other))
    found = script._compare(pair.target, expected, texts)
    assert found["num_equal_texts"] == 0 and not found["near_ties_only"]
    assert all(gap > 0 for gap in found["gaps"])
    assert script._compare(pair.target, expected, expected)["num_equal_tokens"] == sum(
        len(t.token_ids) for t in expected
    )


def test_published_numbers_have_a_place_for_every_batch() -> None:
    assert all(len(speedups) == len(script.BATCHES) and tau > 1 for _, tau, speedups in script.PUBLISHED)


def test_one_of_target_and_tiny_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "found.json")])
