"""What `import paceline` promises; a change here is a change of the public API and belongs in CHANGELOG.md."""

from __future__ import annotations

import pytest

import paceline

PUBLIC = [
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


def test_public_names_are_pinned() -> None:
    assert paceline.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(paceline))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves_to_what_it_says(name: str) -> None:
    value = getattr(paceline, name)
    assert isinstance(value, str) if name == "__version__" else value.__name__ == name


def test_every_error_of_the_tree_is_public() -> None:
    from paceline.core import errors

    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert tree <= set(PUBLIC)


def test_unknown_name_says_what_exists() -> None:
    with pytest.raises(AttributeError, match=r"'Lm'.*LLM"):
        _ = paceline.Lm
