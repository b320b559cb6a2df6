"""Hidden states of texts that are known: the target reads them, and the rows it taps are those of decoding them.

Kept on disk they are read once; online they are computed whenever they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.core.types import EMPTY_PROPOSAL
from paceline.engine.step import PREFILL_ROWS
from paceline.target.base import Target, VerifyRows
from paceline.train.data.features import Document

TEXTS_TOGETHER = 8
"""Texts that run together, unless they need more rows than a pass has."""
Look = Callable[[int, int, torch.Tensor], None]
"""(which text, position p, logits (rows, V)): row i says what the target expects at position p + i."""


def prefill(
    target: Target,
    target_layer_ids: Sequence[int],
    texts: Sequence[Sequence[int]],
    look: Look | None = None,
) -> list[torch.Tensor]:
    """Returns the tapped hidden states (T, taps · D) of each text, on the CPU and rounded to bfloat16.

    The last token is not run: its row is zero, as in a shard. Mutates: the target's taps.

    Args:
        look: shown the logits as they come.
    """
    target.tap(target_layer_ids)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    piece = max(1, PREFILL_ROWS // len(texts))
    sessions = [target.open(len(text)) for text in texts]
    try:
        for start in range(0, max(map(len, texts)) - 1, piece):
            running = [n for n, text in enumerate(texts) if start < len(text) - 1]
            parts = [
                VerifyRows(
                    sessions[n],
                    texts[n][start : start + piece][: len(texts[n]) - 1 - start],
                    EMPTY_PROPOSAL,
                    look is None,
                )
                for n in running
            ]
            for n, part, output in zip(running, parts, target.verify(parts), strict=True):
                sessions[n].keep(range(part.num_rows))
                rows[n].append(output.hidden.to("cpu", torch.bfloat16))
                if look is not None:
                    look(n, start + 1, output.logits)
    finally:
        for session in sessions:
            session.close()
    return [torch.cat([*r, r[0].new_zeros(1, r[0].shape[1])]) for r in rows]


class OnlineFeatures:
    """A target that reads documents when their hidden states are asked for; the last few answers are kept.

    Args:
        target: stays in memory as long as its documents do.
        target_layer_ids: layers to tap.
        in_step: the target is spread over the processes of the run (`HFTarget.shard`), whose passes must keep step:
            then every process has to call `read` equally often, with any documents.
    """

    def __init__(self, target: Target, target_layer_ids: Sequence[int], *, in_step: bool = False) -> None:
        self._target, self._layer_ids, self._in_step = target, tuple(target_layer_ids), in_step
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def read(self, documents: Sequence[OnlineDocument]) -> list[torch.Tensor]:
        """Returns the hidden states of several documents: the bits that a shard would hold of them.

        So far as the target's passes keep their bits whatever rows travel together; else up to bfloat16's last bit.
        """
        known = {d.index: self._kept[d.index] for d in documents if d.index in self._kept}
        missing = list({d.index: d for d in documents if d.index not in known}.values())
        num_spare = self._agree(missing) if self._in_step else 0  # before the first pass: it gathers, too
        size = 1 if self._in_step else TEXTS_TOGETHER
        for start in range(0, len(missing), size):
            group = missing[start : start + size]
            made = prefill(self._target, self._layer_ids, [d.token_ids.tolist() for d in group])
            known |= {d.index: hidden for d, hidden in zip(group, made, strict=True)}
        for _ in range(num_spare):
            prefill(self._target, (), [[0, 0]])
        for document in documents[-TEXTS_TOGETHER:]:
            self._kept[document.index] = known[document.index]
            self._kept.move_to_end(document.index)
        while len(self._kept) > TEXTS_TOGETHER:
            self._kept.popitem(last=False)
        return [known[d.index] for d in documents]

    def _agree(self, missing: Sequence[OnlineDocument]) -> int:
        """Returns how many passes the process that makes the most makes beyond those that this one needs.

        A sharded layer is gathered by all processes or by none, so the others make them too.
        """
        num_passes = sum(-(-(len(d.token_ids) - 1) // PREFILL_ROWS) for d in missing)
        most = torch.tensor(num_passes, device=self._target.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - num_passes


class OnlineDocument(Document):
    """A document whose hidden states are computed when they are asked for.

    Args:
        document: its tokens; its hidden states are not used.
        source: who computes them.
        index: which of the source's documents it is.
    """

    source: OnlineFeatures
    index: int

    def __init__(self, document: Document, source: OnlineFeatures, index: int) -> None:
        kept = {
            name: getattr(document, name) for name in ("token_ids", "supervised", "top_ids", "top_log_probs")
        }
        for name, value in {**kept, "source": source, "index": index}.items():
            object.__setattr__(self, name, value)  # frozen, and `hidden` is no field here

    @property
    def hidden(self) -> torch.Tensor:
        """(T, taps · D) bfloat16; the last row is zero."""
        return self.source.read([self])[0]


def hidden_of(documents: Sequence[Document], sibling: Document | None = None) -> list[torch.Tensor]:
    """Returns the hidden states of several documents of one collection; online ones are computed together.

    Args:
        sibling: any document of the collection. With it there may be none to read, and still a target that is spread
            over processes keeps step with those that read some.
    """
    any_of_them = sibling or documents[0]
    if isinstance(any_of_them, OnlineDocument):
        return any_of_them.source.read([d for d in documents if isinstance(d, OnlineDocument)])
    return [d.hidden for d in documents]
