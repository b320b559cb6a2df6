"""What commands read: text of files and of stdin, UTF-8 or a clear refusal."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.core.errors import ConfigError, RequestError


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        ConfigError: bytes that are not UTF-8.
        OSError: a file that cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got other bytes at {error.start}") from error


def read_prompt(prompt: str) -> str:
    """Returns the prompt, from stdin where it is "-".

    Raises:
        RequestError: no text, or bytes that are not UTF-8.
    """
    text = _read_stdin() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError(
            "prompt: expected some text, got none; hint: pass it as an argument, or '-' and on stdin"
        )
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt: stdin is not UTF-8 text (byte {error.start}); hint: convert it"
        ) from error
