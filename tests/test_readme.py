"""README.md tells the truth: its numbers come from stored results, its code compiles, its commands exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
import readme_tables
from readme_tables import BlockError, render

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELLS = ("bash", "sh", "shell", "console")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")


def python_blocks(readme: str) -> list[str]:
    """Returns the texts of all fenced python blocks."""
    return [body for language, body in _FENCE.findall(readme) if language in ("python", "py")]


def shell_commands(readme: str) -> list[list[str]]:
    """Returns every command of shell blocks and inline code as words: continuations joined, pipes and `;` split."""
    blocks = [body.replace("\\\n", " ") for language, body in _FENCE.findall(readme) if language in SHELLS]
    inline = _INLINE.findall(_FENCE.sub("", readme))
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [command for line in [*lines, *inline] for command in _split(line)]


def _split(line: str) -> Iterator[list[str]]:
    """Yields the commands of one line, without environment assignments and without what follows a redirection."""
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    try:
        tokens = list(lexer)
    except ValueError:  # an apostrophe in inline prose: not a shell command
        tokens = line.split()
    for token in [*tokens, ";"]:
        if set(token) <= set("|&;()"):
            yield from ([words] if words else [])
            words = []
        elif words or "=" not in token:
            words.append(token)


def paceline_commands(readme: str) -> list[list[str]]:
    """Returns the arguments of every command that runs paceline, by name, by path or through python -m."""
    found = []
    for words in shell_commands(readme):
        if Path(words[0]).name == "paceline" and "." not in Path(words[0]).name:
            found.append(words[1:])
        elif "python" in Path(words[0]).name and words[1:3] == ["-m", "paceline"]:
            found.append(words[3:])
    return [arguments for arguments in found if arguments]


def missing_from_cli(arguments: list[str], command: Any) -> str | None:
    """Returns what of `arguments` the click command does not know (a subcommand or an option), else `None`."""
    for word in arguments:
        subcommands = getattr(command, "commands", {})
        if word.startswith("-"):
            options = {
                option for parameter in command.params for option in parameter.opts + parameter.secondary_opts
            }
            if word.partition("=")[0] not in options | {"--help"}:
                return f"{command.name} has no option {word}"
        elif subcommands:
            if word not in subcommands:
                return f"{command.name} has no command {word}"
            command = subcommands[word]
    return None


def test_generated_blocks_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme_tables.main(["--check"]) == 0, capsys.readouterr().err


def test_first_screen_has_the_decode_table() -> None:
    assert "<!-- begin:generated decode -->" in README


def test_python_blocks_compile_and_import_public_names() -> None:
    for block in python_blocks(README):
        tree = ast.parse(block)
        compile(tree, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "paceline":
                assert {alias.name for alias in node.names} <= set(paceline.__all__)


def test_paceline_commands_exist() -> None:
    commands = paceline_commands(README)
    if not commands:
        return
    from paceline.cli.main import app

    root = typer.main.get_command(app)
    missing = [missing_from_cli(arguments, root) for arguments in commands]
    assert not any(missing), [line for line in missing if line]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        word
        for words in shell_commands(README)
        if words[0] == "make"
        for word in words[1:]
        if "=" not in word
    }
    assert named, "README.md should say how to start"
    assert named <= targets


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


# The checks themselves


def test_commands_are_found_wherever_they_stand() -> None:
    readme = (
        "Run `paceline demo`, or `.venv/bin/paceline pull NAME`. It's `paceline.LLM`; don't read `paceline`.\n"
        "```bash\n$ A=1 paceline generate \\\n  --max-new-tokens 8 'a b' | head -3  # c\n"
        "python -m paceline train x > log; make test\n```\n"
    )
    assert paceline_commands(readme) == [
        ["generate", "--max-new-tokens", "8", "a b"],
        ["train", "x", ">", "log"],
        ["demo"],
        ["pull", "NAME"],
    ]


def test_a_command_that_does_not_exist_is_found() -> None:
    app = typer.Typer(name="paceline")
    app.callback()(lambda: None)

    @app.command()
    def demo(json: bool = False) -> None: ...

    root = typer.main.get_command(app)
    assert missing_from_cli(["demo", "--json", "x"], root) is None
    assert missing_from_cli(["demo", "--no-json"], root) is None
    assert missing_from_cli(["dmo"], root) == "paceline has no command dmo"
    assert missing_from_cli(["demo", "--jsn=1"], root) == "demo has no option --jsn=1"


def _row(name: str, num_identical: int = 2, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "set": name,
        "num_prompts": 2,
        "drafts": "chain of 7",
        "identical": num_identical == 2,
        "num_identical": num_identical,
        "acceptance_length": 2.345,
        "plain_tokens_per_s": 10.04,
        "dflash_tokens_per_s": 19.0,
        "ratio": 1.892,
    }
    return row | changes


def _store(folder: Path, *rows: dict[str, object], name: str = "decode_float32", **more: object) -> None:
    result = {
        "command": "make bench",
        "date": "2026-01-02",
        "environment": {
            "processor": "one",
            "cpu_capability": "SOME",
            "num_threads": 2,
            "omp_wait_policy": "default",
            "torch": "2",
            "fast_bfloat16": False,
        },
        "max_new_tokens": 128,
        "row_invariance": "bit-exact",
        "rows": rows,
        "totals": [_row("all")],
        **more,
    }
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


BLOCK = "a\n<!-- begin:generated decode -->\nold\n<!-- end:generated decode -->\nb\n"


def test_table_is_written_from_the_result(tmp_path: Path) -> None:
    _store(tmp_path, _row("maths"), _row("chat", num_identical=1))
    written = render(BLOCK, tmp_path)
    assert "old" not in written
    assert "| maths | chain of 7 | 2 of 2 | 2.35 | 10.0 | 19.0 | 1.89× |\n" in written
    assert "| chat | chain of 7 | 1 of 2 | " in written
    assert "| **all** | chain of 7 | 2 of 2 | " in written
    assert (
        "Measured 2026-01-02 by `make bench` on processor one, cpu_capability SOME, num_threads 2," in written
    )
    assert "bfloat16" not in written and "transformers" not in written
    assert written.startswith("a\n") and written.endswith("-->\nb\n")
    assert render(written, tmp_path) == written


def test_sampled_texts_have_a_sentence(tmp_path: Path) -> None:
    sampled = {"temperature": 0.8, "totals": [_row("all", num_identical=1)]}
    _store(tmp_path, _row("maths"), sampled=sampled)
    assert (
        "At temperature 0.8 over all prompts: chain of 7 τ 2.35, 1.89× (1 of 2 texts the same).\n"
        in render(BLOCK, tmp_path)
    )


def test_other_results_follow_the_table_where_they_exist(tmp_path: Path) -> None:
    batch = [{"batch": 1, "tokens_per_s": 10.0}, {"batch": 64, "tokens_per_s": 75.0}]
    _store(tmp_path, _row("maths"), transformers={"ratio": 1.5}, batch=batch)
    _store(tmp_path, name="decode_bfloat16", totals=[_row("all", num_identical=1)])
    written = render(BLOCK, tmp_path)
    assert "In bfloat16 the tokens are the same for 1 of 2 (chain of 7) prompts, logits bit-exact;" in written
    assert "since this processor has no bfloat16 products" in written
    assert "1.50× as fast as transformers" in written
    assert "7.5× as many tokens per second at batch 64 as at batch 1." in written


def test_missing_result_is_said_and_not_invented(tmp_path: Path) -> None:
    written = render(BLOCK, tmp_path)
    assert "Not measured yet" in written
    assert not re.search(r"\d", written)


def test_malformed_results_and_markers_are_refused(tmp_path: Path) -> None:
    _store(tmp_path, _row("maths", num_identical=1, identical=True))
    with pytest.raises(BlockError, match="counts say otherwise"):
        render(BLOCK, tmp_path)
    _store(tmp_path, {"set": "maths"})
    with pytest.raises(BlockError, match=r"KeyError.*make bench"):
        render(BLOCK, tmp_path)
    with pytest.raises(BlockError, match="no partner"):
        render(BLOCK.replace("end:generated decode", "end:generated other"), tmp_path)
    with pytest.raises(BlockError, match="'other' is unknown"):
        render(BLOCK.replace("generated decode", "generated other"), tmp_path)


def test_stale_readme_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(BLOCK, encoding="utf-8")
    assert readme_tables.main(["--check"], readme, tmp_path) == 1
    assert "make tables" in capsys.readouterr().err
    assert readme.read_text(encoding="utf-8") == BLOCK
    assert readme_tables.main([], readme, tmp_path) == 0
    assert readme_tables.main(["--check"], readme, tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def exactness_results(folder: Path, **changes: Any) -> Path:
    """Returns a folder with small results of the two exactness benchmarks."""
    row = {
        "drafts": "block of 4",
        "batch": 8,
        "num_requests": 200,
        "num_identical": 199,
        "different": ["r7"],
        "acceptance_length": 1.25,
    }
    row |= changes
    plain = row | {"drafts": "plain", "num_identical": 200, "different": [], "acceptance_length": None}
    check = {"name": "directed", "status": "ok", "summary": "z = +0.10 over 900 drafts"}
    result = {
        "dtype": "float32",
        "random": {"command": "x", "date": "today", "row_invariance": "bit-exact", "rows": [plain, row]},
        "tiny": {"rows": [plain, row | {"num_identical": 200, "different": []}]},
        "json": {"num_requests": 50, "num_valid": 49, "rows": [plain, row]},
        "directed": {
            pair: {"num_tokens": count, "checks": [check]}
            for pair, count in (("tiny", 100_000), ("real", 5_000))
        },
    }
    sampling = {
        "temperature": 1.0,
        "cost": [
            {"request": "pass", "rows": 16, "share_of_step": 0.9},
            {"request": "all", "rows": 16, "share_of_step": 0.08},
        ],
        "acceptance": [
            {"set": "all", "drafts": "chain of 7", "keyed": keyed, "acceptance_length": 1.3 + 0.1 * keyed}
            for keyed in (False, True)
        ],
    }
    (folder / "exactness_float32.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "sampling.json").write_text(json.dumps(sampling), encoding="utf-8")
    return folder


def test_exactness_block_says_what_was_measured(tmp_path: Path) -> None:
    block = readme_tables.exactness_block(exactness_results(tmp_path))
    assert "| block of 4 | 8 | 199 of 200 | 1.25 |" in block
    assert "49 of 50 texts valid" in block
    assert (
        "Tiny pair, 100,000 sampled tokens: directed score z = +0.10 over 900 drafts; nothing flagged."
        in block
    )
    assert "at most 8 % of a step of 16 rows" in block and "chain of 7 1.30 → 1.40" in block


def test_exactness_counts_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BlockError, match="do not add up"):
        readme_tables.exactness_block(exactness_results(tmp_path, num_identical=200))
