"""Options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.core.types import MAX_SEED

Target = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Target: a built-in name, a hub id org/name, a folder or a .gguf file."
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        metavar="WHICH", help="Drafter: a folder, 'auto' for the one that ships for the target, or 'none'."
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="N", min=1, max=1_000_000, help="Most tokens of an answer.")
]
Temperature = Annotated[
    float, typer.Option(metavar="X", min=0.0, max=100.0, help="0 takes the likeliest token.")
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=MAX_SEED, help="Same seed, same text, with any drafter or none."),
]
TreeNodes = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=1024, help="Nodes of a draft tree, 0 for chains; what pays here if not given."
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Draft chains of N slots, anchor included; 1 decodes plainly."),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="Where to compute: auto, cpu, or the name of an accelerator.")
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float64.")]
Backend = Annotated[str, typer.Option(metavar="NAME", help="Runner of the target: auto, native or hf.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the target's end of text.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, words on stderr.")]
