"""The plan of the house, enforced: what each file imports, says, and how long it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import house_rules
from house_rules import HABITS, PACKAGE_RULES, Rule, Source, violations

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
OTHER_FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=_name)
def test_package_file_keeps_the_rules(path: Path) -> None:
    broken = violations(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", OTHER_FILES, ids=_name)
def test_other_file_keeps_the_habits(path: Path) -> None:
    broken = violations(_name(path), path.read_text(encoding="utf-8"), HABITS)
    assert not broken, "\n".join(broken)


def test_hardly_any_function_is_long() -> None:
    sources = [Source(_name(path), path.read_text(encoding="utf-8")) for path in PACKAGE_FILES]
    rows = sorted(
        (house_rules.function_lines(function), f"{source.path}:{function.lineno} {function.name}")
        for source in sources
        for function in source.functions
    )
    p95 = rows[int(len(rows) * 0.95)][0]
    print(f"functions: {len(rows)}, median {rows[len(rows) // 2][0]} lines, p95 {p95}, longest {rows[-3:]}")  # noqa: T201
    assert p95 <= house_rules.MAX_FUNCTION_LINES_P95, f"p95 is {p95} lines; the longest: {rows[-10:]}"


def test_rooms_say_what_they_own_and_stand_on_the_plan() -> None:
    plan = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in sorted(path.parent for path in PACKAGE.glob("*/*.py") if path.name == "__init__.py"):
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        assert all(word in text for word in ("Owns:", "May import:", "Never:")), f"{folder.name}/__init__.py"
        assert f"\n  {folder.name}/ " in plan, f"docs/architecture.md does not list the room {folder.name}"


def test_every_folder_with_code_is_a_room() -> None:
    folders = {path.parent for path in PACKAGE_FILES}
    assert all((folder / "__init__.py").exists() for folder in folders), folders


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 80
PARAMETERS = ", ".join(f"p{i}" for i in range(9))

BAD: list[tuple[str, str, str]] = [
    # imports
    ("core/block.py", "from paceline.engine import step", "core may not import engine"),
    ("drafter/dflash.py", "import paceline.target.base", "drafter may not import target"),
    ("target/hf.py", "from paceline.drafter.config import DrafterConfig", "target may not import drafter"),
    ("checkpoint/store.py", "from paceline.engine.step import step", "checkpoint may not import engine"),
    ("engine/step.py", "from paceline.llm import LLM", "engine may not import llm"),
    ("train/trainer.py", "from paceline.bench import runner", "train may not import bench"),
    ("bench/runs/runner.py", "from paceline import serve", "bench may not import serve"),
    ("serve/app.py", "import paceline.export.vllm", "serve may not import export"),
    ("export/vllm.py", "def f():\n    from paceline.train import config", "export may not import train"),
    ("llm.py", "from paceline.cli.main import main", "llm may not import cli"),
    ("core/types.py", "from ..engine import step", "core may not import engine"),
    ("core/types.py", "from .. import engine", "core may not import engine"),
    ("core/types.py", "import_module('paceline.engine.step')", "core may not import engine"),
    ("core/types.py", "if TYPE_CHECKING:\n    from paceline.llm import LLM", "core may not import llm"),
    ("engine/step.py", "from paceline import SamplingParams", "import from the room that owns it"),
    ("engine/step.py", "import paceline.extras", "import from the room that owns it"),
    ("extras/thing.py", "", "not in the plan"),
    # packages
    ("core/block.py", "import numpy", "torch and the standard library only"),
    ("drafter/layers.py", "import safetensors.torch", "torch and the standard library only"),
    ("engine/step.py", "import typer", "typer belongs to cli/"),
    ("train/trainer.py", "from rich.progress import Progress", "rich belongs to cli/"),
    (
        "train/trainer.py",
        "import matplotlib.pyplot",
        "matplotlib belongs to bench/pages/plots.py and train/curves.py",
    ),
    ("llm.py", "import pydantic", "pydantic belongs to serve/"),
    ("cli/main.py", "import uvicorn", "uvicorn belongs to serve/"),
    ("llm.py", "import transformers", "belongs to target/hf.py"),
    ("target/native.py", "from transformers import AutoModelForCausalLM", "belongs to target/hf.py"),
    ("target/text.py", "from transformers import AutoModelForCausalLM", "belongs to target/hf.py"),
    ("target/text.py", "import transformers", "belongs to target/hf.py"),
    ("core/types.py", "from transformers import AutoTokenizer", "belongs to target/hf.py"),
    # words
    ("llm.py", "device = 'cuda:0'", "'cuda:0' belongs to engine/runtime.py"),
    ("cli/main.py", "model.cuda()", "model.cuda belongs to engine/runtime.py"),
    ("target/native.py", "torch.cuda.synchronize()", "torch.cuda belongs to engine/runtime.py"),
    ("drafter/dflash.py", "f = torch.compile(g)", "torch.compile belongs to engine/runtime.py"),
    ("drafter/dflash.py", "from torch import compile", "torch.compile belongs to engine/runtime.py"),
    ("target/pull.py", "os.environ['HF_HOME']", "os.environ belongs to cli and engine/runtime.py"),
    ("engine/step.py", "from os import getenv", "os.getenv belongs to cli and engine/runtime.py"),
    ("train/trainer.py", "print(1)", "print belongs to cli"),
    ("engine/engine.py", "n = int(tensor.item())", ".item() waits for the device"),
    ("engine/output.py", "ids = tensor.tolist()", ".tolist() waits for the device"),
    ("engine/output.py", "tensor.cpu().numpy()", ".cpu() waits for the device"),
    ("engine/output.py", "tensor.to('cpu')", "waits for the device"),
    # names and sizes
    ("engine/utils.py", "", "'utils' in a file or folder name"),
    ("engine/cache_manager.py", "", "'manager' in a file or folder name"),
    ("core/common/block.py", "", "'common' in a file or folder name"),
    ("core/block.py", "x = 1\n" * 451, "451 lines, at most 450"),
    ("core/block.py", LONG_FUNCTION, "long has 81 lines, at most 80"),
    ("core/block.py", f"async def wide({PARAMETERS}): ...", "wide has 9 parameters, at most 8"),
    ("cli/main.py", f"def wide({PARAMETERS}): ...", "wide has 9 parameters, at most 8"),
]


@pytest.mark.parametrize(("path", "text", "expected"), BAD)
def test_a_bad_file_is_found(path: str, text: str, expected: str) -> None:
    assert any(expected in sentence for sentence in violations(path, text)), violations(path, text)


GOOD: list[tuple[str, str]] = [
    ("engine/step.py", "from paceline.core.types import Verdict\nids = tensor.tolist()"),
    ("engine/engine.py", "from . import step\nfrom paceline import __version__\nx.to(torch.float32)"),
    ("cli/main.py", "import typer\nfrom paceline.train import trainer\nprint(os.environ)"),
    ("cli/train.py", f"@app.command()\ndef train({PARAMETERS}): ..."),
    ("train/curves.py", "import matplotlib.pyplot"),
    ("target/text.py", "from transformers import AutoTokenizer, PreTrainedTokenizerFast"),
    ("target/hf.py", "from transformers import AutoModelForCausalLM"),
    ("llm.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
    ("engine/runtime.py", "device = 'cuda'\ntorch.compile(f)\nos.environ['X']"),
    ("core/types.py", 'def f():\n    """On cuda."""\n'),
    ("core/types.py", "class C:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_a_good_file_passes(path: str, text: str) -> None:
    assert violations(path, text) == []


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_a_bad_file(rule: Rule) -> None:
    assert any(violations(path, text, (rule,)) for path, text, _ in BAD)


def _loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nsys.stdout.write(' '.join(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(finished.stdout.split())


def test_importing_paceline_is_light() -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors", "typer", "rich"}
    loaded = _loaded_by("import paceline; dir(paceline); paceline.SamplingParams; paceline.__version__")
    assert "paceline.core.params" in loaded
    assert not heavy & loaded
    assert "torch" in _loaded_by("import torch"), "the check itself must be able to see a heavy import"
