"""`Engine`: add requests, step, cancel. One thread owns it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import CapacityError, ConfigError, RequestError
from paceline.core.types import MAX_SEED, Completion, Request, StepRecord, TokenDelta
from paceline.drafter.base import Drafter
from paceline.engine.output import TextDecoder, cut
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence, room
from paceline.engine.step import prefill, step
from paceline.target.base import Target


class Engine:
    """Decodes many requests together, each as if it were alone.

    Args:
        target: the model whose text it is.
        drafter: who guesses; `None` decodes plainly.
        max_sequences: most sequences that step together.
        block_size: slots per block, anchor included; `None` takes the drafter's, 1 decodes plainly.
        new_decoder: makes an incremental text decoder for a sequence; without it deltas carry no text.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_sequences: int = 8,
        block_size: int | None = None,
        new_decoder: Callable[[], TextDecoder] | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.block_size = self._checked_block_size(block_size)
        self.scheduler = Scheduler(max_sequences)
        self._new_decoder = new_decoder
        self._decoders: dict[str, TextDecoder] = {}
        self._completions: dict[str, Completion] = {}
        self._admitted: list[TokenDelta] = []  # kept where a later admission of the same step fails
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
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: an empty prompt, unknown token ids, or an id that is already held.
            CapacityError: prompt and new tokens exceed the target's positions.
        """
        spec, prompt = self.target.spec, request.prompt_ids
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        unknown = next((t for t in prompt if not 0 <= t < spec.vocab_size), None)
        if unknown is not None:
            raise RequestError(f"prompt: token ids must be in 0…{spec.vocab_size - 1}, got {unknown}")
        if self.scheduler.holds(request.id):
            raise RequestError(f"id: {request.id!r} is already waiting or running")
        if len(prompt) + request.params.max_new_tokens > spec.max_positions:
            raise CapacityError(
                f"prompt of {len(prompt)} + max_new_tokens of {request.params.max_new_tokens} exceed the "
                f"{spec.max_positions} positions of {spec.name}; hint: shorten either"
            )
        self._checked_block_size(request.block_size)
        self.scheduler.waiting.append(request)

    def cancel(self, request_id: str) -> bool:
        """Ends a request now and frees its memory; returns whether it was held."""
        withdrawn = self.scheduler.withdraw(request_id)
        if withdrawn is not None:
            empty = Completion(request_id, withdrawn.prompt_ids, (), "", "cancelled")
            self._completions[request_id] = empty
            return True
        for sequence in self.scheduler.running:
            if sequence.request.id == request_id:
                sequence.text += self._flush(sequence)
                sequence.close("cancelled")
                self._retire()
                return True
        return False

    def take_completion(self, request_id: str) -> Completion:
        """Returns a finished request's completion and forgets it; KeyError where it has not finished."""
        return self._completions.pop(request_id)

    def step(self) -> list[TokenDelta]:
        """Admits what fits, advances every running sequence by one block, and returns what became certain."""
        self._tap()
        while self.scheduler.has_room:
            self._admitted.append(self._admit())
        deltas, self._admitted = self._admitted, []
        self._retire()
        running = self.scheduler.running
        if running:
            started = time.perf_counter()
            verdicts = step(running, self.target, self.drafter)
            elapsed = time.perf_counter() - started
            for sequence, verdict in zip(running, verdicts, strict=True):
                sequence.decode_s += elapsed
                deltas.append(self._deliver(sequence, list(verdict.tokens), sequence.steps[-1]))
        self._retire()
        return deltas

    def close(self) -> None:
        """Cancels everything and frees all memory."""
        for request in list(self.scheduler.waiting):
            self.cancel(request.id)
        for sequence in list(self.scheduler.running):
            self.cancel(sequence.request.id)

    def _admit(self) -> TokenDelta:
        request = self.scheduler.waiting.popleft()
        started = time.perf_counter()
        block_size = request.block_size or self.block_size
        num_prompt, limit = len(request.prompt_ids), self.target.spec.max_positions
        capacity = room(num_prompt, request.params.max_new_tokens, block_size, limit)
        sequence = Sequence(
            request=request,
            seed=secrets.randbelow(MAX_SEED) if request.params.seed is None else request.params.seed,
            block_size=block_size,
            tokens=list(request.prompt_ids),
            context=self.drafter.open(capacity) if self.drafter and block_size > 1 else None,
            session=self.target.open(capacity),  # last, since it must be closed
        )
        try:
            prefill(sequence, self.target, self.drafter)
        except BaseException:
            sequence.close("cancelled")
            raise
        self.scheduler.running.append(sequence)
        if self._new_decoder is not None:
            self._decoders[request.id] = self._new_decoder()
        sequence.prefill_s = time.perf_counter() - started
        return self._deliver(sequence, sequence.tokens[-1:], None)

    def _deliver(self, sequence: Sequence, tokens: list[int], record: StepRecord | None) -> TokenDelta:
        params, eos = sequence.request.params, self.target.spec.eos_token_ids
        delivered, reason = cut(tokens, params, sequence.num_delivered, eos)
        sequence.num_delivered += len(delivered)
        decoder = self._decoders.get(sequence.request.id)
        text = decoder.push(delivered) if decoder else ""
        if reason is not None:
            text += self._flush(sequence)
        sequence.text += text
        if record is not None:
            record = replace(record, num_emitted=len(delivered))
            sequence.steps[-1] = record
        if reason is not None:
            sequence.close(reason)
        return TokenDelta(
            request_id=sequence.request.id,
            token_ids=tuple(delivered),
            text=text,
            num_drafted_tokens=min(record.num_accepted, len(delivered)) if record else 0,
            step=record,
            finish_reason=reason,
        )

    def _flush(self, sequence: Sequence) -> str:
        decoder = self._decoders.pop(sequence.request.id, None)
        return decoder.flush() if decoder else ""

    def _retire(self) -> None:
        for sequence in self.scheduler.retire():
            self._completions[sequence.request.id] = sequence.completion()
