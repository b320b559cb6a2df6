"""Random texts of a grammar on the default target's tokenizer, through its masks only."""

from __future__ import annotations

import random

import torch

from paceline.core.params import Grammar
from paceline.target.grammar import GrammarCompiler, TokenAutomaton
from paceline.target.pull import DEFAULT_TARGET, pull
from paceline.target.text import TextCodec

VOCAB_SIZE, NUM_PADDED = 49152, 64
EOS, OTHER_EOS, CHAT_START = 2, 0, 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "日本", 3, None]}, "maxItems": 3},
        "score": {"type": "number", "exclusiveMinimum": -1, "maximum": 1},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CURRENT = {"$defs": {"leaf": {"type": "boolean"}}, "anyOf": [{"$ref": "#/$defs/leaf"}, {"const": {"x": [1]}}]}
SUM = 'start: e\ne: NUMBER | "(" NUMBER " + " e ")"\nNUMBER: /[1-9][0-9]?/'

GRAMMARS = {
    "person": Grammar.json_schema(PERSON),
    "current": Grammar.json_schema(CURRENT),
    "regex": Grammar("regex", r"(\p{L}{2,5}[ -]){0,4}[0-9]{3}"),
    "lark": Grammar("lark", SUM),
}


def two_ended_codec() -> TextCodec:
    """Returns the default target's codec, as if it had two ends of text."""
    codec = TextCodec.load(pull(DEFAULT_TARGET))
    codec.eos_token_ids = (OTHER_EOS, EOS)
    return codec


def padded_compiler(codec: TextCodec) -> GrammarCompiler:
    """Returns a compiler for logits with more rows than the tokenizer has tokens."""
    return GrammarCompiler(codec, VOCAB_SIZE + NUM_PADDED)


def choose(legal: torch.Tensor, draws: random.Random) -> int:
    """Returns one of the tokens of a mask."""
    tokens = legal.nonzero()[:, 0]
    return int(tokens[draws.randrange(len(tokens))])


def write(automaton: TokenAutomaton, draws: random.Random) -> list[int]:
    """Returns a random text of the language, token by token through its masks, without its end."""
    tokens: list[int] = []
    while not automaton.has_ended:
        token = choose(automaton.mask(), draws)
        automaton.advance([token])
        tokens.append(token)
        assert len(tokens) < 300
    return tokens[:-1]
