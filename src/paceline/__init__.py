"""Speculative decoding with block-diffusion drafters: several tokens a step, not one of them changed.

Public names load on first use: `import paceline` loads neither torch nor transformers. The room `paceline.train` is a
package and keeps its name, so its function is imported from there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        DownloadError,
        IncompatiblePairError,
        LossyConversionError,
        PacelineError,
        RequestError,
        UnknownFormatError,
        UnsupportedTargetError,
    )
    from paceline.core.params import Grammar, SamplingParams
    from paceline.core.types import Completion, TokenDelta
    from paceline.drafter.config import DrafterConfig
    from paceline.llm import LLM
    from paceline.train.config import TrainConfig

    __version__: str

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DownloadError",
    "DrafterConfig",
    "Grammar",
    "IncompatiblePairError",
    "LossyConversionError",
    "PacelineError",
    "RequestError",
    "SamplingParams",
    "TokenDelta",
    "TrainConfig",
    "UnknownFormatError",
    "UnsupportedTargetError",
    "__version__",
]

_HOME = {
    "LLM": "paceline.llm",
    "Completion": "paceline.core.types",
    "Grammar": "paceline.core.params",
    "SamplingParams": "paceline.core.params",
    "TokenDelta": "paceline.core.types",
    "DrafterConfig": "paceline.drafter.config",
    "TrainConfig": "paceline.train.config",
}


def __getattr__(name: str) -> Any:
    """Returns the public `name`, importing the room that owns it on first use."""
    if name not in __all__:
        raise AttributeError(
            f"module 'paceline' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = _version() if name == "__version__" else _from_home(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _from_home(name: str) -> Any:
    return getattr(import_module(_HOME.get(name, "paceline.core.errors")), name)


def _version() -> str:
    """Returns the installed version, or "0+uninstalled" when run from a source folder that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("paceline")
    except PackageNotFoundError:
        return "0+uninstalled"
