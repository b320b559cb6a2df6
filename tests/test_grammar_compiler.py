"""From grammars to masks over real tokens: texts are valid, ends and special tokens in place, nothing ignored."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from grammar_texts import (
    CHAT_START,
    CURRENT,
    EOS,
    NUM_PADDED,
    OTHER_EOS,
    PERSON,
    SUM,
    VOCAB_SIZE,
    padded_compiler,
    two_ended_codec,
    write,
)
from paceline.core.errors import RequestError
from paceline.core.params import Grammar
from paceline.target.grammar import GrammarCompiler
from paceline.target.pull import DEFAULT_TARGET, pull
from paceline.target.text import TextCodec


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return two_ended_codec()


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> GrammarCompiler:
    return padded_compiler(codec)


def test_texts_of_a_schema_are_valid(compiler: GrammarCompiler, codec: TextCodec) -> None:
    for schema in (PERSON, CURRENT):
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        texts = {
            codec.decode(write(compiler.open(Grammar.json_schema(schema)), random.Random(seed)))
            for seed in range(25)
        }
        for text in texts:
            validator.validate(json.loads(text))
        assert len(texts) > 2


def test_texts_of_an_expression_match_it_whole(compiler: GrammarCompiler, codec: TextCodec) -> None:
    pattern = r"[あ-ん東京]{2,4} ?(👩‍🚀|½|é)+[a-c]?"
    for seed in range(25):
        text = codec.decode(write(compiler.open(Grammar("regex", pattern)), random.Random(seed)))
        assert re.fullmatch(pattern, text), text


def test_texts_of_a_context_free_grammar_belong_to_it(compiler: GrammarCompiler, codec: TextCodec) -> None:
    def is_sum(text: str) -> bool:
        while (shorter := re.sub(r"\([1-9][0-9]? \+ [1-9][0-9]?\)", "1", text)) != text:
            text = shorter
        return re.fullmatch(r"[1-9][0-9]?", text) is not None

    texts = [
        codec.decode(write(compiler.open(Grammar("lark", SUM)), random.Random(seed))) for seed in range(25)
    ]
    assert all(map(is_sum, texts)) and any("(" in text for text in texts)


def test_half_a_character_is_followed_by_its_other_half(compiler: GrammarCompiler, codec: TextCodec) -> None:
    first, *rest = codec.encode("👩")
    assert rest and "\ufffd" in codec.decode([first])
    automaton = compiler.open(Grammar("regex", "👩|👨"))
    assert automaton.mask()[first]
    automaton.advance([first])
    assert not automaton.mask()[[EOS, OTHER_EOS]].any() and automaton.mask()[rest[0]]


def test_padded_rows_are_never_allowed(codec: TextCodec, compiler: GrammarCompiler) -> None:
    anything = Grammar("regex", "(?s:.*)")
    padded, bare = compiler.open(anything).mask(), GrammarCompiler(codec, VOCAB_SIZE).open(anything).mask()
    assert padded.shape == (VOCAB_SIZE + NUM_PADDED,) and not padded[VOCAB_SIZE:].any()
    assert torch.equal(padded[:VOCAB_SIZE], bare) and bare.sum() > 48_000
    narrow = GrammarCompiler(codec, 1000).open(anything).mask()
    assert torch.equal(narrow, bare[:1000])
    automaton = compiler.open(anything)
    with pytest.raises(RequestError, match="not in the language"):
        automaton.advance([100, VOCAB_SIZE + 1])
    assert torch.equal(automaton.mask(), padded)
    with pytest.raises(ValueError, match="expected 0…0 tokens to take back, got 1"):
        automaton.retreat(1)


def test_every_end_of_text_ends_a_complete_text_and_nothing_else(
    compiler: GrammarCompiler, codec: TextCodec
) -> None:
    automaton = compiler.open(Grammar("regex", "ab?"))
    assert not automaton.mask()[[EOS, OTHER_EOS]].any()
    with pytest.raises(RequestError, match="is not in the language"):
        automaton.advance([*codec.encode("a"), EOS, *codec.encode("b")])
    with pytest.raises(RequestError, match="token 2 is not in the language"):
        automaton.advance([EOS])
    for end in (EOS, OTHER_EOS):
        automaton.advance(codec.encode("a"))
        assert automaton.mask()[[EOS, OTHER_EOS]].all() and not automaton.has_ended
        automaton.advance([end])
        assert automaton.has_ended and automaton.mask().nonzero()[:, 0].tolist() == [OTHER_EOS, EOS]
        automaton.advance([EOS, OTHER_EOS])  # what a verdict may commit behind an end
        automaton.retreat(3)
        assert not automaton.has_ended and automaton.mask()[codec.encode("b")[0]]
        automaton.retreat(1)
        assert torch.equal(automaton.mask(), compiler.open(Grammar("regex", "ab?")).mask())
    with pytest.raises(ValueError, match="expected 0…0 tokens to take back, got 1"):
        automaton.retreat(1)


def test_special_tokens_come_only_where_the_grammar_names_them(
    compiler: GrammarCompiler, codec: TextCodec
) -> None:
    named = compiler.open(Grammar("lark", 'start: <|im_start|> "user"'))
    assert named.mask().nonzero()[:, 0].tolist() == [CHAT_START]
    spelled = compiler.open(Grammar("regex", re.escape("<|im_start|>")))
    assert spelled.mask().any() and not spelled.mask()[CHAT_START]
    const = compiler.open(Grammar.json_schema({"const": "<|im_start|>"}))
    assert codec.decode(write(const, random.Random(0))) == '"<|im_start|>"'
    anything = compiler.open(Grammar("regex", "(?s:.+)"))
    assert not anything.mask()[[i for i in range(VOCAB_SIZE) if codec.is_silent(i)]].any()


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        ('{"a":[1,2]}', True),
        ('{"a": [1, 2]}', True),
        ('{ "a" : [ 1 , 2 ] }', True),
        ('{\n  "a": [\n    1,\n    2\n  ]\n}', True),
        ('{\n\n\t"a": [1]}', True),
        ('{"a":  [1]}', False),
        ('{\n\n\n"a": [1]}', False),
        ('{\n \n"a": [1]}', False),
        (' {"a": [1]}', False),
        ('{"a": [1]}\n', False),
    ],
)
def test_white_space_between_the_parts_of_json_is_bounded(
    compiler: GrammarCompiler, codec: TextCodec, text: str, is_legal: bool
) -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}, "type": "array"}}, "type": "object"}
    inline = Grammar("lark", f"start: %json {json.dumps(schema)}")
    for grammar in (Grammar.json_schema(schema), inline):
        if is_legal:
            compiler.open(grammar).advance([*codec.encode(text), EOS])
        else:
            with pytest.raises(RequestError, match="not in the language"):
                compiler.open(grammar).advance([*codec.encode(text), EOS])


def test_a_schema_may_set_its_own_white_space(compiler: GrammarCompiler, codec: TextCodec) -> None:
    compact = Grammar.json_schema({"x-guidance": {"whitespace_pattern": "x{0}"}, "const": [1, 2]})
    with pytest.raises(RequestError, match="not in the language"):
        compiler.open(compact).advance(codec.encode("[1, 2]"))
    compiler.open(compact).advance(codec.encode("[1,2]"))


SCHEMAS_REFUSED: list[tuple[Any, str]] = [
    (False, "expected a JSON schema that is an object, got false"),
    ({"bogus": 1}, "keyword 'bogus' at the top"),
    ({"$defs": {"a": {"items": [{"nullable": True}]}}}, r"keyword 'nullable' at /\$defs/a/items/0"),
    ({"properties": {"a/b": {"if": {}}}}, "keyword 'if' at /properties/a~1b"),
    ({"type": "string", "format": "bogus"}, "Unknown format: bogus"),
    ({"type": "integer", "format": "int32"}, "format 'int32' at the top .* for strings only"),
    ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems'"),
    ({"type": "strin"}, "json_schema: .*Invalid type: strin"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable schema"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf constraints are not supported"),
    (
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "number"}, {"type": "integer"}]},
        "oneOf not",
    ),
    ({"x-guidance": {"lenient": True}, "type": "string", "format": "bogus"}, "Unknown format"),
    ({"x-guidance": {"bogus": 1}}, "unknown field `bogus`"),
    ({"x-guidance": 3}, "invalid type"),
    ({"items": {"x-guidance": {}}}, "keyword 'x-guidance' at /items"),
    ({"$schema": "https://example.org/mine"}, r"\$schema: expected"),
    ({"$ref": "https://example.org/mine"}, r"\$ref: expected a pointer"),
    ({"$ref": "#/enum/0", "enum": [{"bogus": 1}]}, r"\$ref: expected a pointer"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text belongs to it"),
    (
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{(i + 1) % 4000}"} for i in range(4000)}},
        "at most 1000 different references, got 4000",
    ),
]
SOURCES_REFUSED = [
    ("json_schema", '{"type": "string", "type": "integer"}', "the key 'type' twice"),
    ("json_schema", '{"minimum": NaN}', "NaN is no number"),
    ("json_schema", "{", "json_schema: Expecting property name"),
    ("json_schema", f'{{"const": {"[" * 5000}{"]" * 5000}}}', "json_schema: .*recursion"),
    ("json_schema", '{"const": "\\ud800"}', "json_schema: .*escape"),
    ("regex", "(a", "regex: .*unclosed group"),
    ("regex", "a(?!b)", "regex: .*look-around"),
    ("regex", r"(a)\1", "regex: .*backreferences"),
    ("regex", r"[^\x00-\U0010ffff]", "no text belongs to it: no token may come next"),
    ("regex", "\ud800", "regex: .*surrogates"),
    ("lark", "begin: /a/", "lark: no start rule"),
    ("lark", "start: start", "no text belongs to it"),
    ("lark", "start: <|nope|>", "lark: .*unknown special token"),
    ("lark", 'start: <|im_end|> "x"', "no text belongs to it"),
    ("lark", "start[temperature=0.5]: /a/", "attribute 'temperature'"),
    ("lark", 'start: x "b"\nx[lazy, max_tokens=5]: /a+/', "attribute 'max_tokens'"),
    ("lark", 'start[stop="b"]: /a+/', "attribute 'stop'"),
    ("lark", '%llguidance {"bogus": 1}\nstart: /a/', "%llguidance: expected only .* got .'bogus'"),
    (
        "lark",
        '%llguidance {"no_forcing": false}\nstart: /a/',
        "%llguidance: expected only .* got .'no_forcing'",
    ),
    ("lark", 'start: %json {"items": {"bogus": 1}}', "keyword 'bogus' at /items"),
    ("lark", 'start: %json {"type": "string", "type": "integer"}', "the key 'type' twice"),
    ("lark", 'start: %json {"type":', "lark: failed to parse"),
    ("lark", '{"grammars": [{"json_schema": {"bogus": 1}}]}', "lark: .*expecting rule"),
    (
        "lark",
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4000)),
        "at most 1000 rules, got 4001",
    ),
]


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [("json_schema", json.dumps(schema), reason) for schema, reason in SCHEMAS_REFUSED] + SOURCES_REFUSED,
)
def test_what_cannot_be_kept_is_refused(
    compiler: GrammarCompiler, kind: Any, source: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=f"^grammar: .*{reason}"):
        compiler.open(Grammar(kind, source))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, '{"anything": [1, "é", null]}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "const": 3}, "3"),
        ({"x-order": 1, "title": "t", "$id": "https://example.org/a", "type": "null"}, "null"),
        (
            {"properties": {"a/b c": {"$ref": "#/$defs/p~1q%20"}}, "$defs": {"p/q ": {"const": 1}}},
            '{"a/b c": 1}',
        ),
        ({"type": ["string", "integer"], "format": "date"}, '"2024-02-29"'),
    ],
)
def test_what_only_looks_unusual_is_accepted(
    compiler: GrammarCompiler, codec: TextCodec, schema: Any, text: str
) -> None:
    compiler.open(Grammar.json_schema(schema)).advance([*codec.encode(text), EOS])


def test_an_older_dialect_hides_no_keyword(compiler: GrammarCompiler, codec: TextCodec) -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "const": 3}
    with pytest.raises(RequestError, match="not in the language"):
        compiler.open(Grammar.json_schema(schema)).advance(codec.encode("4"))


def test_texts_of_one_grammar_do_not_meet(compiler: GrammarCompiler, codec: TextCodec) -> None:
    grammar = Grammar("regex", "ab")
    one, other = compiler.open(grammar), compiler.open(grammar)
    one.advance(codec.encode("a"))
    assert other.mask()[codec.encode("ab")[0]] and not one.mask()[codec.encode("ab")[0]]


def test_a_target_without_an_end_of_text_takes_no_grammar() -> None:
    codec = TextCodec.load(pull(DEFAULT_TARGET))
    codec.eos_token_ids = ()
    with pytest.raises(RequestError, match="grammar: the target has no end of text"):
        GrammarCompiler(codec, VOCAB_SIZE).open(Grammar("regex", "a"))
