"""Text ↔ token ids with a model folder's own tokenizer, and text that arrives token by token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.core.errors import CheckpointError, ConfigError, RequestError
from paceline.target.folder import read_json, sha256_of

ROLES = ("system", "user", "assistant", "tool")


class TextCodec:
    """The tokenizer of a model folder.

    Args:
        tokenizer: a loaded fast tokenizer.
        eos_token_ids: ids that end a text.
        digest: sha256 of vocabulary and merges.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: tuple[int, ...], digest: str
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.digest = digest
        added = tokenizer.added_tokens_decoder
        self._silent_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Returns the codec of a model folder; reads nothing outside it.

        Raises:
            CheckpointError: no tokenizer there, or one that cannot be read.
        """
        hint = "hint: put the model's tokenizer.json and tokenizer_config.json there"
        if not any(folder.glob("tokenizer.*")) and not any(folder.glob("vocab.*")):
            raise CheckpointError(f"{folder}: expected tokenizer.json, found no tokenizer; {hint}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the tokenizers library raises plain Exception on a malformed file
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{folder}: its tokenizer cannot be loaded ({reason}); {hint}") from error
        return cls(tokenizer, eos_token_ids=read_eos_token_ids(folder), digest=tokenizer_digest(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._tokenizer.chat_template is not None

    @property
    def serialized(self) -> str:
        """The tokenizer as the text of a tokenizer.json: added tokens included, neither padding nor truncation.

        Raises:
            ConfigError: a tokenizer that has no such form.
        """
        if not self._tokenizer.is_fast:
            raise ConfigError("the target's tokenizer has no tokenizer.json form; hint: convert it to one")
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, with the tokens the tokenizer itself puts before it (BOS), no chat template.

        Raises:
            RequestError: not text, or text that UTF-8 cannot hold.
        """
        return self._encode("prompt", text, add_special_tokens=True)

    def encode_word(self, text: str) -> list[tuple[int, ...]]:
        """Returns the spellings of a word: by itself, and as most tokenizers write it behind a space; no BOS."""
        bare = text.lstrip(" ") or text
        spelled = [self._encode("bad_words", word, add_special_tokens=False) for word in (bare, f" {bare}")]
        return list(dict.fromkeys(map(tuple, spelled)))

    def render_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of a conversation by the model's chat template, up to where the assistant begins.

        Args:
            messages: `{"role": ..., "content": ...}`, roles system, user, assistant or tool.
            add_generation_prompt: without it the ids end with the last message.

        Raises:
            ConfigError: the tokenizer has no chat template.
            RequestError: no messages, a malformed one, or one that the template refuses.
        """
        if not self.has_chat_template:
            raise ConfigError(
                "the target's tokenizer has no chat template; hint: send plain text, or use an instruct model"
            )
        _check_messages(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of the model's author; it may raise anything
            raise RequestError(f"messages: the model's chat template refuses them ({error})") from error
        return self._encode("messages", str(text), add_special_tokens=False)

    def _encode(self, parameter: str, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"{parameter}: expected text, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"{parameter}: half of a surrogate pair at character {error.start}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, special tokens left out, spaces untouched; broken bytes become U+FFFD."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token is special, so that decoded text leaves it out."""
        return token_id in self._silent_ids


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list with at least one message, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            keys = sorted(map(str, message)) if isinstance(message, dict) else type(message).__name__
            raise RequestError(f"messages[{i}]: expected exactly the keys role and content, got {keys}")
        if message["role"] not in ROLES:
            raise RequestError(
                f"messages[{i}].role: expected one of {', '.join(ROLES)}, got {message['role']!r}"
            )
        if not isinstance(message["content"], str):
            raise RequestError(
                f"messages[{i}].content: expected text, got {type(message['content']).__name__}"
            )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the union of the end-of-sequence ids that generation_config.json, config.json and the tokenizer name."""
    ids = _eos_of_tokenizer(folder)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _eos_of_tokenizer(folder: Path) -> set[int]:
    """Returns the id of tokenizer_config.json's `eos_token`, as far as tokenizer.json lists it."""
    if not (folder / "tokenizer_config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return set()
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos  # older files describe the token in full
    added = read_json(folder / "tokenizer.json").get("added_tokens", ())
    return {token["id"] for token in added if token["content"] == content}


def tokenizer_digest(folder: Path) -> str:
    """Returns the sha256 over tokens with their ids and merges, or "" where the folder has no tokenizer.

    Two files that spell the same vocabulary differently have one digest; how text is split beforehand is not part of
    it, since a drafter only ever sees ids.
    """
    if not (folder / "tokenizer.json").is_file():
        model = folder / "tokenizer.model"
        return sha256_of(model) if model.is_file() else ""
    content = read_json(folder / "tokenizer.json")
    model = content["model"]
    vocab = model["vocab"]
    pieces = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
    ids = {**dict(pieces), **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}
    merges = [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges", ())]
    canonical: list[Any] = [sorted(ids.items(), key=lambda item: (item[1], item[0])), merges]
    return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()


class IncrementalDecoder:
    """Text of a token stream, never half a character, at a cost per token that does not grow.

    Only a short window of tokens is decoded again. Characters that may still change, which are replacement characters
    at its end, wait for the next tokens or for `flush`. For byte-level tokenizers the pieces together are exactly
    `decode(all ids)`, broken bytes included.

    Deviation: with byte-fallback (sentencepiece) tokenizers, a byte sequence that turns out invalid after a valid
    start is shown as that start and replacement characters, where `decode` of everything shows the latter only.
    """

    # A waiting character is at most 3 bytes of at least one token each, so the last 16 tokens contain what may wait
    # (3 replacement characters), and 3 more that a cut inside a character may spoil.
    _KEPT = 16
    _LIMIT = 48
    _MAX_WAITING = 3

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that is certain after these tokens."""
        pieces = []
        for start in range(0, len(ids), self._KEPT):
            pieces.append(self._push(ids[start : start + self._KEPT]))
        return "".join(pieces)

    def _push(self, ids: Sequence[int]) -> str:
        self._window += [i for i in ids if not self._codec.is_silent(i)]
        text = self._codec.decode(self._window)
        num_certain = len(text)
        while (
            num_certain > max(self._num_shown, len(text) - self._MAX_WAITING)
            and text[num_certain - 1] == "\ufffd"
        ):
            num_certain -= 1
        piece = text[self._num_shown : num_certain]
        self._num_shown = max(self._num_shown, num_certain)
        if len(self._window) > self._LIMIT:
            num_waiting = len(text) - self._num_shown
            self._window = self._window[-self._KEPT :]
            self._num_shown = len(self._codec.decode(self._window)) - num_waiting
        return piece

    def flush(self) -> str:
        """Returns what was held back, and is ready for another text."""
        text = self._codec.decode(self._window)[self._num_shown :]
        self._reset()
        return text
