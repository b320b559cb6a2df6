"""Options that several commands share, declared once, and how a group of them becomes one argument of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from paceline.target.pull import DEFAULT_TARGET

Target = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Target: a built-in name, a hub id org/name, a folder or a .gguf file."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="Where to compute: auto, cpu, or the name of an accelerator.")
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float64.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, words on stderr.")]


@dataclass(frozen=True, slots=True)
class Pair:
    """Which target and drafter decode, and how; see `LLM`. `cli.decoding.open_pair` loads them."""

    target: Target = DEFAULT_TARGET
    drafter: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="Drafter: a folder, 'auto' for the one that ships for the target, 'lookup' to copy from the text, "
            "or 'none'.",
        ),
    ] = "auto"
    lookup: Annotated[
        bool, typer.Option(help="Copy where the text repeats itself, and let the drafter draft the rest.")
    ] = True
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Draft chains of N slots, anchor included; 1 decodes plainly."),
    ] = None
    tree_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=1024, help="Nodes of a draft tree, 0 for chains; what pays if not given."
        ),
    ] = None
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--no-exact",
            help="Probe that no pass changes a bit of plain decoding, or refuse; or spend nothing on it.",
            show_default=False,
        ),
    ] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Runner of the target: auto, native or hf.")
    ] = "auto"
    offline: Offline = False


class Command(TyperCommand):
    """A command whose help gives each option group a section, behind the command's own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the sections of the help. Mutates: formatter."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or title
            if record is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


Function = TypeVar("Function", bound=Callable[..., None])


def command(app: typer.Typer) -> Callable[[Function], Function]:
    """Returns a decorator that makes a function the command of `app`.

    A parameter whose type is an option group, a dataclass of options with defaults, stands for all of them: the command
    line has an option for each field, and the function gets the group.
    """

    def register(function: Function) -> Function:
        app.command(cls=Command)(_with_options_for_groups(function))
        return function

    return register


def _with_options_for_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function with a keyword for each field of its groups, in a signature that typer can read."""
    given = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in given.items() if is_dataclass(p.annotation)}
    parameters = [
        option
        for parameter in given.values()
        for option in (_options_of(parameter.annotation) if parameter.name in groups else [parameter])
    ]

    @functools.wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    readable: Any = call
    readable.__signature__ = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    readable.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    """Yields a parameter for each field of a group, its option in the group's section of the help."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(types[field.name])
        option = copy(option)  # one declaration may serve several groups and commands
        option.rich_help_panel = group.__name__
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )
