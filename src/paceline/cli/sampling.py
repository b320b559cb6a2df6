"""The options that shape a text, and the `SamplingParams` that they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.input import read_text
from paceline.core.errors import ConfigError
from paceline.core.params import Grammar, SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

_GRAMMARS = {"json_schema": "--json-schema", "regex": "--regex", "grammar": "--grammar"}
_FLAGS: dict[str, str | tuple[str, ...]] = {
    "bad_words": "--bad-word",
    "allowed_token_ids": "--allowed-token-id",
    "stop_token_ids": "--stop-token-id",
    "grammar": tuple(_GRAMMARS.values()),
}
"""Options that are not called as the field of `SamplingParams` is."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and where the text ends; see `SamplingParams`, which holds the ranges."""

    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(metavar="N", help="Only the N likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[
        float, typer.Option(metavar="X", help="Only the likeliest tokens that hold probability X; 1 is off.")
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            metavar="X", help="Only tokens with share X of the likeliest one's probability; 0 is off."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="Weakens tokens that prompt or answer hold; 1 is off."),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="Weakens tokens that the answer holds; 0 is off."),
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Weakens tokens by how often the answer holds them; 0 is off.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Added to a token's logit, such as 17=-5; repeatable."),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-word", metavar="TEXT", help="Never written, behind a space or not; repeatable."),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--allowed-token-id", metavar="ID", help="The only tokens of the answer; repeat for more."
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Ends the answer and is not part of it; repeatable."),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", metavar="ID", help="A token that ends the answer; repeatable."),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the target's end of text.")] = (
        False
    )
    min_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Nothing ends the answer before N tokens.")
    ] = 0
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE_OR_JSON", help="The answer is JSON that this schema allows."),
    ] = None
    regex: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The whole answer matches this expression.")
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer belongs to this Lark grammar.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Same seed, same text, with any drafter or none.")
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Log-probabilities of each token and the N likeliest ones; with --json."
        ),
    ] = None
    logprobs_mode: Annotated[
        str,
        typer.Option(metavar="MODE", help="raw: of the target; processed: of what was drawn from."),
    ] = "raw"

    def params(self, *, as_json: bool, **own: Any) -> SamplingParams:
        """Returns what the options ask for; bad words wait for `for_target`.

        Args:
            as_json: whether the answer is shown as JSON, which alone has a place for log-probabilities.
            own: fields of `SamplingParams` that are options of the command itself.

        Raises:
            typer.BadParameter: a value that cannot be, or not beside the others.
            ConfigError, OSError: a grammar's file that cannot be read.
        """
        if self.logprobs is not None and not as_json:
            raise typer.BadParameter("needs --json, which shows them", param_hint="--logprobs")
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {
            "logit_bias": [_bias(text) for text in self.logit_bias or ()],
            # any token stands for a word's own, so that everything can be checked before there is a tokenizer
            "bad_words": [(0,) if text else () for text in self.bad_words or ()],
            "allowed_token_ids": self.allowed_token_ids or None,
            "stop_token_ids": self.stop_token_ids or (),
            "stop": self.stop or (),
        }
        for name in _GRAMMARS:
            del given[name]
        grammar = self._grammar()
        with named_as_options():
            return SamplingParams(**{**given, **lists}, **own, grammar=grammar)

    def for_target(self, params: SamplingParams, llm: LLM) -> SamplingParams:
        """Returns the parameters with the bad words in the target's own tokens.

        Raises:
            RequestError: what the target cannot do, said now rather than at each line of a conversation.
        """
        spelled = [ids for text in self.bad_words or () for ids in llm.codec.encode_word(text)]
        params = replace(params, bad_words=tuple(spelled))
        params.check_for_target(llm.target.spec.vocab_size, llm.target.spec.eos_token_ids)
        if params.grammar is not None:
            llm.grammars.open(params.grammar)
        return params

    def _grammar(self) -> Grammar | None:
        given = [flag for name, flag in _GRAMMARS.items() if getattr(self, name) is not None]
        if len(given) > 1:
            raise typer.BadParameter(f"expected one grammar, got {len(given)}", param_hint=given)
        schema = None if self.json_schema is None else _json_text(self.json_schema)
        lark = None if self.grammar is None else read_text(self.grammar)
        with named_as_options():
            if schema is not None:
                return Grammar.json_schema(schema)
            if self.regex is not None:
                return Grammar("regex", self.regex)
            return None if lark is None else Grammar("lark", lark)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Turns a value that `SamplingParams` refuses into wrong usage of its option.

    Raises:
        typer.BadParameter: the reason, under the option's name.
    """
    try:
        yield
    except ConfigError as error:
        field, _, reason = str(error).partition(": ")
        name = field.partition(".")[0]
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        raise typer.BadParameter(reason, param_hint=flag) from error


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"expected ID=VALUE, such as 17=-5, got {text!r}", param_hint="--logit-bias"
        ) from error


def _json_text(file_or_json: str) -> str:
    """Returns the schema: the text itself where it begins like an object, else that of the file."""
    is_json = file_or_json.lstrip().startswith("{")
    return file_or_json if is_json else read_text(Path(file_or_json))
