"""Reads source text and says which rules of the house it breaks (docs/architecture.md has them in words).

A rule takes one parsed file and yields sentences; `violations` runs rules over a text, so a test can feed it a bad one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

# A room imports itself and rooms of a smaller number; rooms of one number are strangers or siblings.
LEVELS = {
    "core": 0,
    "drafter": 1,
    "target": 1,
    "checkpoint": 2,
    "engine": 3,
    "llm": 4,
    "serve": 5,
    "bench": 5,
    "train": 5,
    "export": 5,
    "testing": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}

# Where a third-party package may be imported, as path prefixes below src/paceline.
HOMES = {
    "typer": ("cli/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "matplotlib": (
        "bench/pages/plots.py",
        "train/curves.py",
    ),  # the training curve is drawn where training happens
    "plotly": ("bench/pages/plots.py", "bench/pages/page.py"),
    "jinja2": ("bench/pages/page.py",),
    "prometheus_client": ("bench/arms/counters.py",),
    "llguidance": ("target/grammar.py",),
    "dflash": ("bench/arms/oracles.py",),
    "fastapi": ("serve/",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "pydantic": ("serve/",),
}
TORCH_ONLY_ROOMS = ("core", "drafter")
BANNED_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
HOST_COPIES = {"item", "tolist", "cpu", "numpy"}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_FUNCTION_LINES_P95 = 45
MAX_PARAMETERS = 8

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported thing as a dotted path, `from a.b import c` being `a.b.c`."""

    dotted: str
    line: int
    for_types_only: bool

    @property
    def package(self) -> str:
        return self.dotted.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """A file: its path below src/paceline (or below the repository, outside the package) and its text."""

    path: str
    text: str

    @property
    def room(self) -> str:
        first = PurePosixPath(self.path).parts[0]
        return first.removesuffix(".py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @cached_property
    def imports(self) -> list[Import]:
        typing_only = {id(child) for block in self._typing_blocks() for child in ast.walk(block)}
        return [
            Import(dotted, node.lineno, id(node) in typing_only)
            for node in self.nodes
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
            for dotted in _imported_by(node, self.path)
        ]

    @property
    def functions(self) -> list[FunctionNode]:
        return [node for node in self.nodes if isinstance(node, FunctionNode)]

    def _typing_blocks(self) -> Iterator[ast.stmt]:
        for node in self.nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test) in (
                "TYPE_CHECKING",
                "typing.TYPE_CHECKING",
            ):
                yield from node.body


def _imported_by(node: ast.AST, path: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = ".".join(filter(None, [_package_of(path, level) if level else "", module or ""]))
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            is_import = ast.unparse(func) in ("import_module", "importlib.import_module", "__import__")
            return [name] if is_import else []
    return []


def _package_of(path: str, level: int) -> str:
    parts = ["paceline", *PurePosixPath(path).parts]
    return ".".join(parts[: len(parts) - level])


Rule = Callable[[Source], Iterator[str]]


def rooms_import_downwards(source: Source) -> Iterator[str]:
    """Yields imports that go up, sideways, to a room nobody planned, or through the public names."""
    if source.room not in LEVELS:
        yield f"1: room {source.room!r} is not in the plan ({', '.join(LEVELS)})"
        return
    for imported in source.imports:
        if imported.package != "paceline" or imported.dotted == "paceline.__version__":
            continue
        room = imported.dotted.partition(".")[2].partition(".")[0]
        if room not in LEVELS:
            yield f"{imported.line}: imports {imported.dotted}; inside the house, import from the room that owns it"
        elif room != source.room and LEVELS[room] >= LEVELS[source.room]:
            yield f"{imported.line}: {source.room} may not import {room} ({imported.dotted})"


def packages_stay_home(source: Source) -> Iterator[str]:
    """Yields third-party imports outside the places that own them."""
    for imported in source.imports:
        homes = HOMES.get(imported.package)
        if homes and not source.path.startswith(homes):
            yield f"{imported.line}: {imported.package} belongs to {' and '.join(homes)}"
        if source.room in TORCH_ONLY_ROOMS and not _is_torch_or_standard(imported.package):
            yield f"{imported.line}: {source.room} imports torch and the standard library only, not {imported.package}"


def _is_torch_or_standard(package: str) -> bool:
    return package in ("torch", "paceline") or package in sys.stdlib_module_names


def transformers_stays_home(source: Source) -> Iterator[str]:
    """Yields imports of transformers other than models where they run, tokenizers in target/text.py, and types."""
    runs_models = source.path in ("target/hf.py", "bench/arms/oracles.py")
    for imported in source.imports:
        if imported.package != "transformers" or imported.for_types_only or runs_models:
            continue
        if not (source.path == "target/text.py" and "token" in imported.dotted.lower()):
            yield (
                f"{imported.line}: {imported.dotted} belongs to target/hf.py (or, to be compared with, to "
                "bench/arms/oracles.py), tokenizers to target/text.py"
            )


def devices_stay_home(source: Source) -> Iterator[str]:
    """Yields mentions of cuda and torch.compile outside engine/runtime.py; docstrings may speak of them."""
    if source.path == "engine/runtime.py":
        return
    docstrings = {id(node.body[0].value) for node in source.nodes if _has_docstring(node)}  # type: ignore[attr-defined]  # guarded
    for node in source.nodes:
        match node:
            case ast.Constant(value=str(text)) if re.search(r"\bcuda\b", text, re.IGNORECASE):
                if id(node) not in docstrings:
                    yield f"{node.lineno}: {text!r} belongs to engine/runtime.py"
            case ast.Attribute(attr="cuda") | ast.Attribute(value=ast.Name(id="torch"), attr="compile"):
                yield f"{node.lineno}: {ast.unparse(node)} belongs to engine/runtime.py"
    for imported in source.imports:
        if imported.dotted.startswith(("torch.cuda", "torch.compile", "torch.compiler")):
            yield f"{imported.line}: {imported.dotted} belongs to engine/runtime.py"


def _has_docstring(node: ast.AST) -> bool:
    documented = isinstance(node, (ast.Module, ast.ClassDef, FunctionNode))
    return documented and ast.get_docstring(node, clean=False) is not None  # type: ignore[arg-type]  # checked above


def environment_stays_home(source: Source) -> Iterator[str]:
    """Yields reads and writes of the environment outside cli and engine/runtime.py."""
    if source.path.startswith("cli/") or source.path == "engine/runtime.py":
        return
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield f"{node.lineno}: {ast.unparse(node)} belongs to cli and engine/runtime.py"
    for imported in source.imports:
        if imported.dotted in {f"os.{name}" for name in names}:
            yield f"{imported.line}: {imported.dotted} belongs to cli and engine/runtime.py"


def only_cli_prints(source: Source) -> Iterator[str]:
    """Yields calls of print outside cli."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id="print")) if not source.path.startswith("cli/"):
                yield f"{node.lineno}: print belongs to cli"


def one_file_syncs(source: Source) -> Iterator[str]:
    """Yields copies from device to host in engine outside the step and the trees it verifies."""
    if source.room != "engine" or source.path in ("engine/step.py", "engine/tree.py"):
        return
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in HOST_COPIES:
                yield f"{node.lineno}: .{attribute}() waits for the device; it belongs to engine/step.py"
            case ast.Call(func=ast.Attribute(attr="to")) if "'cpu'" in ast.unparse(node):
                yield f"{node.lineno}: {ast.unparse(node)} waits for the device; it belongs to engine/step.py"


def names_say_something(source: Source) -> Iterator[str]:
    """Yields parts of the path that name no thing."""
    for part in PurePosixPath(source.path).with_suffix("").parts:
        for word in BANNED_WORDS.intersection(part.lower().split("_")):
            yield f"1: {word!r} in a file or folder name says nothing; a file is a noun"


def sizes_are_small(source: Source) -> Iterator[str]:
    """Yields files and functions that are too long, and functions with too many parameters."""
    num_lines = source.text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for function in source.functions:
        lines, parameters = function_lines(function), num_parameters(function)
        if lines > MAX_FUNCTION_LINES:
            yield f"{function.lineno}: {function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        if parameters > MAX_PARAMETERS and not _is_command(function, source):
            yield f"{function.lineno}: {function.name} has {parameters} parameters, at most {MAX_PARAMETERS}"


def function_lines(function: FunctionNode) -> int:
    """Returns the lines from `def` to the end, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def num_parameters(function: FunctionNode) -> int:
    """Returns how many parameters a caller sees: `self` and `cls` do not count, `*args` and `**kwargs` do."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
    return len([argument for argument in [*named, *stars] if argument.arg not in ("self", "cls")])


def _is_command(function: FunctionNode, source: Source) -> bool:
    """Whether it is a command or `LLM` itself, whose parameters are the options that a user sees."""
    if source.path == "llm.py" and function.name == "__init__":
        return True
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return source.path.startswith("cli/") and any(".command(" in text for text in decorators)


HABITS: tuple[Rule, ...] = (names_say_something, sizes_are_small)
PACKAGE_RULES: tuple[Rule, ...] = (
    rooms_import_downwards,
    packages_stay_home,
    transformers_stays_home,
    devices_stay_home,
    environment_stays_home,
    only_cli_prints,
    one_file_syncs,
    *HABITS,
)


def violations(path: str, text: str, rules: tuple[Rule, ...] = PACKAGE_RULES) -> list[str]:
    """Returns a sentence `path:line: what is wrong` for every broken rule; pure."""
    source = Source(path, text)
    return [f"{path}:{sentence}" for rule in rules for sentence in rule(source)]
