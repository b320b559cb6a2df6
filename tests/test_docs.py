"""What docs/exactness.md claims: every test that it names exists, and every fault has its line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 40
    missing = [f"{file}::{name}" for file, name in NAMED if name not in functions(file)]
    assert not missing


def test_every_fault_has_its_line() -> None:
    section = PAGE[PAGE.index("## Faults of others") :]
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \| .+ \| .+ \|$", section, re.MULTILINE)]
    assert numbers == list(range(1, 37))
