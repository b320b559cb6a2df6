"""From a `Grammar` to an automaton over the target's tokens, by llguidance.

The language is that of the library, with these differences, all on the side of refusing:

- JSON schemas are read as `target/schema.py` says. String `format`s are enforced and unknown ones refused; properties
  come in the schema's order; names that only `additionalProperties` or `patternProperties` allow may repeat.
- "lark" is the library's dialect of Lark, with `%json {…}` for schemas and `<|name|>` for special tokens, which no
  other grammar lets through. Rule attributes that do something else than describe a language are refused.
- Ends of text are allowed exactly where the text is complete, all of the target's alike, and nowhere else.

A grammar may lead into a dead end, or meet a limit of the library, in the middle of a text. `mask` then raises
`RequestError`: that request must end there, as an error and not as a finished text; no other request is concerned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

import llguidance
import numpy as np
import torch

from paceline.core.errors import RequestError
from paceline.core.params import Grammar
from paceline.target.schema import MAX_REFERENCES, parse, prepare, unique_keys
from paceline.target.text import TextCodec

NUM_KEPT = 32
"""Compiled grammars that are kept for the next request that asks for them."""

FREE_TOKENS = '%llguidance {"no_forcing": true}'
"""Where the bytes to come are certain, the library would allow only the token that its tokenizer writes there, which
may be a special one where the text only spells its name. So the target chooses among all tokens that spell them."""

OPTIONS = frozenset(("allow_invalid_utf8", "allow_initial_skip"))
"""What `%llguidance {…}` may say; the library ignores what it does not know."""

_RULE = re.compile(r"^[ \t]*[?!]*[\w-]+[^\n:\"/]*:", re.MULTILINE)
_ATTRIBUTE = re.compile(
    r"^[ \t]*[?!]*[\w-]+[^\S\n]*\[[^\]]*?\b(temperature|max_tokens|stop)\s*=", re.MULTILINE
)
_OBJECT = re.compile(r"%(json|llguidance)\s*(?=\{)")


class GrammarCompiler:
    """Makes automata of grammars for one target.

    Args:
        codec: the target's tokenizer.
        vocab_size: V of the target's logits; rows beyond the tokenizer are never allowed.
    """

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self._codec, self._vocab_size = codec, vocab_size
        self._compiled = lru_cache(maxsize=NUM_KEPT)(self._compile)

    def open(self, grammar: Grammar) -> TokenAutomaton:
        """Returns an automaton at the start of a grammar; `Grammar.after` is for the engine.

        Raises:
            RequestError: the grammar is invalid, impossible, or says something that would be ignored.
        """
        return self._compiled(grammar.kind, grammar.source).copy()

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer's bytes as the library reads them; takes a second or so."""
        ends = [token for token in self._codec.eos_token_ids if token < self._vocab_size]
        if not ends:
            raise RequestError("grammar: the target has no end of text, so no grammar could be complete")
        try:
            return llguidance.LLTokenizer(self._codec.serialized, eos_token=ends)
        except ValueError as error:
            raise RequestError(
                f"grammar: the target's tokenizer cannot be constrained ({_line(error)})"
            ) from error

    def _compile(self, kind: str, source: str) -> TokenAutomaton:
        """Returns the automaton of a grammar at its start, to be copied."""
        try:
            text = _translate(kind, source)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar: {kind}: {_line(error)}") from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        remarks = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if remarks:
            raise RequestError(f"grammar: {kind}: {_line('; '.join(remarks))}")
        automaton = TokenAutomaton(matcher, self._tokenizer, self._vocab_size)
        automaton.copy().mask()  # raises where no text belongs to the language
        return automaton


class TokenAutomaton:
    """Where one text stands in its language; see `engine.grammar.Automaton`.

    Ends of text never reach the library, which takes only some of them back: they are counted here.

    Args:
        start: the library's matcher at the start of the language; copied, never moved.
        tokenizer: the tokenizer it was made for.
        vocab_size: V.
    """

    def __init__(
        self, start: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, vocab_size: int
    ) -> None:
        self._start, self._tokenizer, self._vocab_size = start, tokenizer, vocab_size
        self._ends = tuple(tokenizer.eos_tokens)
        self._matcher = start.deep_copy()
        self._tokens: list[int] = []  # without ends of text
        self._num_ends = 0

    def copy(self) -> TokenAutomaton:
        """Returns another automaton at the start of the same language."""
        return TokenAutomaton(self._start, self._tokenizer, self._vocab_size)

    @property
    def has_ended(self) -> bool:
        """Whether an end of text was consumed; only ends of text may follow."""
        return self._num_ends > 0

    def mask(self) -> torch.Tensor:
        """Returns which tokens may come next, (V,) bool.

        Raises:
            RequestError: no token may come next, or a limit of the library is reached.
        """
        if self.has_ended:
            legal = np.zeros(self._vocab_size, dtype=np.bool_)
        else:
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                raise self._dead_end(self._matcher.get_error())
            legal = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        legal[list(self._ends)] = self._may_end()
        if not legal.any():
            raise self._dead_end("NoExtension")
        return torch.from_numpy(legal)

    def advance(self, tokens: Sequence[int]) -> None:
        """Consumes legal tokens, all or none.

        Raises:
            RequestError: one of them is illegal.
        """
        for i, token in enumerate(tokens):
            if not self._consume(token):
                self.retreat(i)
                raise RequestError(f"grammar: token {token} is not in the language at this point")

    def retreat(self, num_tokens: int) -> None:
        """Takes the last tokens back; also out of a state in which `mask` raised."""
        if not 0 <= num_tokens <= len(self._tokens) + self._num_ends:
            raise ValueError(
                f"expected 0…{len(self._tokens) + self._num_ends} tokens to take back, got {num_tokens}"
            )
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        num_tokens -= num_ends
        del self._tokens[len(self._tokens) - num_tokens :]
        if not self._matcher.rollback(num_tokens):  # it met an error, and never leaves that state
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._tokens)

    def _consume(self, token: int) -> bool:
        if token in self._ends:
            self._num_ends += self._may_end()
            return self.has_ended
        is_legal = not self.has_ended and self._matcher.try_consume_tokens([token]) == 1
        if is_legal:
            self._tokens.append(token)
        return is_legal

    def _may_end(self) -> bool:
        return self.has_ended or self._matcher.is_accepting()

    def _dead_end(self, reason: str) -> RequestError:
        what = "no token may come next" if reason.startswith("NoExtension") else _line(reason)
        if not self._tokens:
            return RequestError(f"grammar: no text belongs to it: {what}")
        return RequestError(
            f"grammar: the text cannot go on after {len(self._tokens)} tokens: {what}; hint: a simpler grammar, in "
            "which every beginning can be completed"
        )


def _translate(kind: str, source: str) -> str:
    """Returns the source in the library's own form: whatever the kind, one Lark grammar."""
    if kind == "json_schema":
        lark = f"start: %json {json.dumps(prepare(parse(source)))}"
    elif kind == "regex":
        (whole,) = json.loads(llguidance.LLMatcher.grammar_from_regex(source))["grammars"]
        lark = whole["lark_grammar"]
    else:
        lark = _checked_lark(source)
    return json.dumps({"grammars": [{"name": "grammar", "lark_grammar": f"{FREE_TOKENS}\n{lark}"}]})


def _checked_lark(source: str) -> str:
    """Returns a Lark grammar with its inline schemas prepared; refuses what would be ignored or not be taken back."""
    attribute = _ATTRIBUTE.search(source)
    if attribute:
        raise RequestError(f"grammar: lark: the attribute {attribute[1]!r} of a rule is not supported")
    num_rules = len(_RULE.findall(source))
    if num_rules > MAX_REFERENCES:
        raise RequestError(f"grammar: lark: expected at most {MAX_REFERENCES} rules, got {num_rules}")
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    pieces, position = [], 0
    while found := _OBJECT.search(source, position):
        try:
            value, end = decoder.raw_decode(source, found.end())
        except (json.JSONDecodeError, RecursionError):
            end = found.end()  # the library says what is wrong with it
            pieces.append(source[position:end])
        else:
            if found[1] == "llguidance" and not OPTIONS.issuperset(value):
                raise RequestError(
                    f"grammar: lark: %llguidance: expected only {', '.join(sorted(OPTIONS))}, got {sorted(value)}"
                )
            prepared = prepare(value) if found[1] == "json" else value
            pieces += [source[position : found.end()], json.dumps(prepared)]
        position = end
    return "".join([*pieces, source[position:]])


def _line(reason: object) -> str:
    """Returns the library's words on one line of bearable length."""
    text = " ".join(str(reason).split())
    return text if len(text) <= 300 else f"{text[:299]}…"
