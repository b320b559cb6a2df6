"""`Engine`: add requests, step, cancel. One thread owns it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import CapacityError, ConfigError, RequestError
from paceline.core.params import MAX_SEED, Grammar
from paceline.core.sampling import Law
from paceline.core.types import Completion, Request, StepRecord, TokenDelta
from paceline.drafter.base import Drafter
from paceline.engine.grammar import Automaton, Delayed
from paceline.engine.output import Output, TextDecoder
from paceline.engine.pacing import budget_of
from paceline.engine.prefix import Memory, PrefixCache
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence, room
from paceline.engine.step import step
from paceline.target.base import Target


class Engine:
    """Decodes many requests together, each as if it were alone.

    Args:
        target: the model whose text it is.
        drafter: who guesses; `None` decodes plainly. A `Paced` one brings the budget of its steps.
        max_sequences: most sequences that step together.
        block_size: slots per block, anchor included; `None` takes the drafter's, 1 decodes plainly.
        new_decoder: makes an incremental text decoder for a sequence; without it deltas carry no text, and requests
            with stop strings are refused.
        open_grammar: makes the automaton of a grammar; without it requests with a grammar are refused.
        keyed_drafts: draft with a request's own noise at temperatures above 0; changes the speed, never the text.
        prefix_tokens: tokens of ended texts that are kept for prompts which begin alike (see `PrefixCache`); what
            running texts have read is shared in any case.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_sequences: int = 8,
        block_size: int | None = None,
        new_decoder: Callable[[], TextDecoder] | None = None,
        open_grammar: Callable[[Grammar], Automaton] | None = None,
        keyed_drafts: bool = True,
        prefix_tokens: int = 0,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.block_size = self._checked_block_size(block_size)
        self.scheduler = Scheduler(max_sequences)
        self.prefixes = PrefixCache(prefix_tokens)
        self.keyed_drafts = keyed_drafts
        self._budget = budget_of(drafter)
        self._new_decoder, self._open_grammar = new_decoder, open_grammar
        self._automata: dict[str, Automaton] = {}  # of waiting requests
        self._completions: dict[str, Completion] = {}
        self._deltas: list[TokenDelta] = []  # kept where what follows in the same step fails
        self._tap()

    def _tap(self) -> None:
        """Asks the target for this engine's layers; another engine may have asked for others since."""
        self.target.tap(self.drafter.target_layer_ids if self.drafter else ())

    def _checked_block_size(self, block_size: int | None) -> int:
        largest = self.drafter.block_size if self.drafter else 1
        if block_size is None:
            return largest
        if not 1 <= block_size <= largest:
            raise ConfigError(
                f"block_size: expected 1…{largest} "
                f"({'the drafter was trained for that' if self.drafter else 'no drafter is loaded'}), got {block_size}"
            )
        return block_size

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a delta has not been handed out yet."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._deltas)

    def add(self, request: Request) -> list[str]:
        """Queues a request, or one for each of its `n` texts, and returns their ids (see `Request.samples`).

        Raises:
            RequestError: an empty prompt, token ids that the target does not have, an id that is already held, a
                grammar that cannot be compiled, or filters that could leave no token.
            CapacityError: prompt and new tokens exceed the target's positions.
        """
        self._check(request)
        samples = request.samples()
        for sample in samples:
            if self.scheduler.holds(sample.id):
                raise RequestError(f"id: {sample.id!r} is already waiting or running")
        automata = [self._automaton(sample) for sample in samples]
        for sample, automaton in zip(samples, automata, strict=True):
            if automaton is not None:
                self._automata[sample.id] = automaton
            self.scheduler.waiting.append(sample)
        return [sample.id for sample in samples]

    def _check(self, request: Request) -> None:
        spec, prompt, params = self.target.spec, request.prompt_ids, request.params
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        unknown = next((t for t in prompt if not 0 <= t < spec.vocab_size), None)
        if unknown is not None:
            raise RequestError(f"prompt: token ids must be in 0…{spec.vocab_size - 1}, got {unknown}")
        params.check_for_target(spec.vocab_size, spec.eos_token_ids)
        if params.stop and self._new_decoder is None:
            raise RequestError(
                "stop: stop strings need text, and this engine decodes none; hint: new_decoder"
            )
        if len(prompt) + params.max_new_tokens > spec.max_positions:
            raise CapacityError(
                f"prompt of {len(prompt)} + max_new_tokens of {params.max_new_tokens} exceed the "
                f"{spec.max_positions} positions of {spec.name}; hint: shorten either"
            )
        self._checked_block_size(request.block_size)

    def _automaton(self, request: Request) -> Automaton | None:
        if request.params.grammar is None:
            return None
        if self._open_grammar is None:
            raise RequestError("grammar: this engine compiles no grammars; hint: open_grammar")
        automaton, after = self._open_grammar(request.params.grammar), request.params.grammar.after
        return Delayed(automaton, after) if after else automaton

    def cancel(self, request_id: str) -> bool:
        """Ends a request now and frees its memory; returns whether it was held."""
        withdrawn = self.scheduler.withdraw(request_id)
        if withdrawn is not None:
            self._automata.pop(request_id, None)
            self._completions[request_id] = _unbegun(withdrawn, "cancelled")
            return True
        self._retire()  # what ended in a step that failed is no longer held
        for sequence in self.scheduler.running:
            if sequence.request.id == request_id:
                self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
                sequence.output.flush()
                sequence.end("cancelled")
                self._retire()
                return True
        return False

    def take_completion(self, request_id: str) -> Completion:
        """Returns a finished request's completion and forgets it; KeyError where it has not finished."""
        return self._completions.pop(request_id)

    def step(self) -> list[TokenDelta]:
        """Admits what fits, advances every running sequence by one block, reads on in the prompts of the others.

        Returns what became certain. A step that raised can be repeated: no sequence is lost, and no token.
        """
        self._tap()
        self._retire()
        self._admit()
        if self.scheduler.running:
            self._advance()
        self._retire()
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> None:
        """Cancels everything and frees all memory."""
        for request in list(self.scheduler.waiting):
            self.cancel(request.id)
        for sequence in list(self.scheduler.running):
            self.cancel(sequence.request.id)
        self.prefixes.close()
        self._deltas = []

    def _admit(self) -> None:
        """Starts waiting requests, first come first served; one that there is no memory for ends with an error.

        A request whose prompt begins like one that is being read waits until it can be copied. Nothing is lost by that,
        since prompts are read in their order.
        """
        while self.scheduler.has_room:
            request = self.scheduler.waiting[0]
            if self.prefixes.is_being_read(
                request.prompt_ids, self.scheduler.running, self._drafter_of(request)
            ):
                return
            try:
                self.scheduler.running.append(self._open(request))
            except CapacityError as error:
                self._completions[request.id] = _unbegun(request, "error", str(error))
                self._deltas.append(TokenDelta(request.id, (), finish_reason="error"))
                self._automata.pop(request.id, None)
            self.scheduler.waiting.popleft()

    def _advance(self) -> None:
        """Makes the step and delivers what was said."""
        started = time.perf_counter()
        verdicts = step(
            self.scheduler.running,
            self.target,
            self.drafter,
            budget=self._budget,
            keyed_drafts=self.keyed_drafts,
        )
        now = time.perf_counter()
        for sequence, verdict in verdicts:
            if sequence.output.num_tokens:
                sequence.decode_s += now - started
                record = sequence.steps[-1]
            else:  # its prompt has been read
                sequence.prefill_s, record = now - sequence.admitted_at, None
            self._deltas.append(self._deliver(sequence, list(verdict.tokens), record))

    def _drafter_of(self, request: Request) -> Drafter | None:
        return self.drafter if (request.block_size or self.block_size) > 1 else None

    def _open(self, request: Request) -> Sequence:
        """Returns the sequence of a request that starts now.

        Raises:
            CapacityError: there is no memory for it.
        """
        spec, params = self.target.spec, request.params
        block_size = request.block_size or self.block_size
        capacity = room(len(request.prompt_ids), params.max_new_tokens, block_size, spec.max_positions)
        output = Output(params, params.ends(spec.eos_token_ids), self._new_decoder and self._new_decoder())
        law = Law(
            params,
            spec.vocab_size,
            seed=secrets.randbelow(MAX_SEED) if params.seed is None else params.seed,
            sample_index=request.sample_index,
            num_prompt_tokens=len(request.prompt_ids),
            eos_token_ids=spec.eos_token_ids,
        )
        memory = self.prefixes.open(  # last, since it must be closed
            request.prompt_ids, capacity, self.scheduler.running, self.target, self._drafter_of(request)
        )
        return Sequence(
            request=request,
            law=law,
            output=output,
            block_size=block_size,
            tokens=list(request.prompt_ids),
            session=memory.session,
            context=memory.context,
            num_reused_tokens=memory.session.length,
            automaton=self._automata.pop(request.id, None),
        )

    def _deliver(self, sequence: Sequence, tokens: list[int], record: StepRecord | None) -> TokenDelta:
        before = sequence.output.num_tokens
        delivery = sequence.output.take(tokens)
        if record is not None:
            record = replace(record, num_emitted=len(delivery.token_ids))
            sequence.steps[-1] = record
        if delivery.finish_reason is not None:
            sequence.end(delivery.finish_reason, delivery.stop_reason)
        return TokenDelta(
            request_id=sequence.request.id,
            token_ids=delivery.token_ids,
            text=delivery.text,
            num_drafted_tokens=min(record.num_accepted, len(delivery.token_ids)) if record else 0,
            step=record,
            finish_reason=delivery.finish_reason,
            logprobs=tuple(sequence.logprobs[before : before + len(delivery.token_ids)]),
        )

    def _retire(self) -> None:
        """Takes leave of sequences that have ended; what was read of them may serve others."""
        for sequence in self.scheduler.retire():
            name = sequence.request.id
            if sequence.finish_reason == "error":
                self._deltas.append(TokenDelta(name, (), sequence.output.flush(), finish_reason="error"))
            self._completions[name] = sequence.completion()
            if sequence.is_prefilling:
                sequence.session.close()
            else:
                told = [
                    *sequence.request.prompt_ids,
                    *sequence.new_tokens,
                ]  # without what lies beyond its end
                self.prefixes.park(Memory(told, sequence.session, sequence.context))


def _unbegun(request: Request, finish_reason: str, stop_reason: str | None = None) -> Completion:
    """Returns what a request comes to that never started."""
    return Completion(
        request.id,
        request.prompt_ids,
        (),
        "",
        finish_reason,
        stop_reason=stop_reason,
        sample_index=request.sample_index,
    )
