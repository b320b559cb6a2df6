"""Device, dtype and what the arithmetic of this machine keeps: the only file that says "cuda".

Row invariance is a property of kernels, so it is measured, not assumed: the same tokens are run one at a time, in
chains of several widths, on branches of trees and beside other texts, and the logits are compared bit by bit.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import ConfigError, UnsupportedTargetError
from paceline.core.recorder import Recordable, Tensors
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.engine.graphs import Graphs
from paceline.target.base import Target, TargetSession, VerifyRows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
CACHE_VARIABLE = "PACELINE_CACHE"
PROBE_WIDTHS = (2, 3, 5, 8, 11, 16, 22, 32)
PROBE_LENGTHS, PROBE_ROWS = (96, 179, 243, 308, 497), 3
PROBE_BESIDE = (40, 90)
PROBE_TREES = (((0, 0, 2, 2), (0, 2, 4)), ((0, 0, 1, 1), (0, 1, 3)))
"""Parents of a tree, and those of its rows that spell the text; the other nodes are decoys before or behind them."""


def choose_device(name: str) -> torch.device:
    """Returns the device called "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: an unknown name, or a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name!r} is not there ({torch.cuda.device_count()} CUDA devices); hint: cpu"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype called "float32", "bfloat16", "float64", or for "auto" the faster exact one of this machine.

    On a CPU bfloat16 is chosen only where the processor multiplies it (AVX-512 or AMX); elsewhere PyTorch runs it row
    by row, and a pass over 8 rows costs 8 passes.
    """
    if name == "auto":
        fast_half = device.type == "cuda" or has_fast_bfloat16()
        return torch.bfloat16 if fast_half else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected auto, {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]


def has_fast_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix products."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def default_tree_nodes(device: torch.device, dtype: torch.dtype, exact: bool = True) -> int | None:
    """Returns the nodes of a draft tree that pay when nobody says otherwise, `None` for chains.

    A target that is not `exact` sums the keys of a tree's branches in another order than plain decoding does. In
    bfloat16 that flips near-ties often enough to change texts, so there, and on CUDA, where no pass is exact, chains
    are drafted. In float32 a flip takes two logits equal to about six digits.

    On a CPU every float32 row costs a few percent of a pass and every branch of an exact tree some more, so few nodes
    pay; with bfloat16 products, and on CUDA, rows are nearly free.
    """
    if device.type == "cuda":
        return None if dtype is torch.bfloat16 else 15
    if dtype is torch.bfloat16:
        return 5 if exact else None
    return 2


WARM_UPS = 2
"""Runs before a capture: libraries then have chosen their kernels and taken their workspaces."""


MAX_COMPILED = 1 << 16


class GraphCapture:
    """Records passes as CUDA graphs of one memory pool (a `Capture`).

    Args:
        device: a CUDA device.
        compiled: let `torch.compile` fuse a pass before it is recorded; the first of each bucket then takes a minute.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self.device, self._compiled = device, compiled
        self._pool = torch.cuda.graph_pool_handle()
        # a pool whose last graph went cannot be used again, so one stays
        self._keeper = self._captured(lambda: (torch.zeros(1, device=device),))

    def record(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Returns a replay of `function` (see `Capture.record`)."""
        return self._captured(compiled_pass(function) if self._compiled else function)

    def _captured(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = function()

        def replay() -> Tensors:
            graph.replay()
            return outputs

        return replay


def compiled_pass(function: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """Returns `function`, fused by `torch.compile` at its first call.

    However many passes have been compiled: beyond eight of one function PyTorch would quietly leave it as it is.
    """
    fused = torch.compile(function, dynamic=False, fullgraph=True)
    limits = {"recompile_limit": MAX_COMPILED, "accumulated_recompile_limit": MAX_COMPILED}

    def call() -> Tensors:
        with torch._dynamo.config.patch(limits):
            outputs: Tensors = fused()
        return outputs

    return call


def record_passes(device: torch.device, *parts: object, compiled: bool = False) -> Graphs | None:
    """Lets those of `parts` (a target, a drafter) that can have their passes recorded, where the device can.

    Mutates: the parts; drafters record the contexts that are opened from now on. On CUDA also, for the whole process,
    which attention kernels PyTorch takes: not cuDNN's, which plans anew for every K/V length.

    Returns:
        What holds the recordings; `None` on a CPU, where a launch costs nothing.
    """
    if device.type != "cuda":
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    graphs = Graphs(GraphCapture(device, compiled=compiled))
    for part in parts:
        if isinstance(part, Recordable):
            part.record(graphs)
    return graphs


def synchronize(device: torch.device) -> None:
    """Waits until a device has done what it was told, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_dir() -> Path | None:
    """Returns the folder named by PACELINE_CACHE, or `None` for the platform's own."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else None


def machine() -> dict[str, object]:
    """Returns what a stored result must say of the machine it was measured on."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "fast_bfloat16": has_fast_bfloat16(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def reset_peak_memory(device: torch.device) -> bool:
    """Lets `peak_memory_bytes` count from now; returns whether this system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="ascii"
        )  # proc(5): sets VmHWM to what is held now
    except OSError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """Returns the most memory held since `reset_peak_memory`, `None` where the system does not say.

    On CUDA it is what tensors took on the device, on a CPU the resident memory of the whole process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def memory_limit_bytes(device: torch.device) -> int | None:
    """Returns what `peak_memory_bytes` may come to: held now and free; `None` where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    sizes: dict[str, int] = {}
    try:
        for path in ("/proc/meminfo", "/proc/self/status"):
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                if line.startswith(("MemAvailable:", "VmRSS:")):
                    sizes[path] = 1024 * int(line.split()[1])
        group = Path("/sys/fs/cgroup/memory.max")
        limit = group.read_text(encoding="ascii").strip() if group.exists() else "max"
    except OSError:
        return None
    total = sum(sizes.values())
    return total if limit == "max" else min(total, int(limit))


@dataclass(frozen=True, slots=True)
class RowProbe:
    """Whether a row's logits depend on the rows that travel with it.

    Args:
        widths: widths of the chains that were compared with one-row passes.
        differing: those of them whose logits differ in any bit.
        trees: whether branches of trees have the bits of one-row passes; `None` where the target takes chains only.
        batches: whether texts that run together have the bits of texts that run alone.
    """

    widths: tuple[int, ...]
    differing: tuple[int, ...]
    trees: bool | None
    batches: bool

    @property
    def kinds(self) -> dict[str, bool]:
        """Which kinds of passes keep their bits."""
        trees = {} if self.trees is None else {"trees": self.trees}
        return {"chains": not self.differing, **trees, "batches": self.batches}

    @property
    def is_exact(self) -> bool:
        """Whether all kinds agree with plain decoding bit by bit."""
        return all(self.kinds.values())

    @property
    def verdict(self) -> str:
        """In words."""
        exact = [kind for kind, keeps in self.kinds.items() if keeps]
        others = [kind for kind, keeps in self.kinds.items() if not keeps]
        if not exact or not others:
            return "equal up to near-ties" if others else "bit-exact"
        return f"{' and '.join(exact)} bit-exact, {' and '.join(others)} equal up to near-ties"


def probe_rows(target: Target, widths: Sequence[int] = PROBE_WIDTHS) -> RowProbe:
    """Returns which passes change a row's bits on this machine, in a few seconds.

    At several context lengths, some just below a length at which kernels change, the same tokens follow one by one,
    in chains of each width and on branches of trees. Every row of a chain is compared at the first length, where the
    last rows of a pass may round otherwise; the first rows at the others. A chain also runs beside a tree and a lone
    row of two shorter texts.
    """
    rng = random.Random(7)
    most = max(*widths, PROBE_ROWS)
    lengths = [length for length in PROBE_LENGTHS if length + most < target.spec.max_positions]
    ids = [rng.randrange(target.spec.vocab_size) for _ in range(max(lengths) + most)]
    session, *others = sessions = [target.open(len(ids)) for _ in (0, *PROBE_BESIDE)]
    differing, trees, batches = set[int](), list[bool](), list[bool]()
    try:
        for other, length in zip(others, PROBE_BESIDE, strict=True):
            _prefill(target, other, ids[:length])
        for length in lengths:
            _prefill(target, session, ids[session.length : length])
            text, num_rows = ids[length:], most if length == lengths[0] else PROBE_ROWS
            chains = {w: _logits(target, session, text, Proposal.chain(text[1:w])) for w in widths}
            branches = _branches(target, session, text)
            batches.append(_keep_to_themselves(target, sessions, text, has_trees=bool(branches)))
            lone = _one_by_one(target, session, text[:num_rows])
            differing |= {w for w, logits in chains.items() if not _agree(logits, lone)}
            trees += [_agree(logits, lone) for logits in branches]
    finally:
        for opened in sessions:
            opened.close()
    return RowProbe(tuple(widths), tuple(sorted(differing)), all(trees) if trees else None, all(batches))


def _prefill(target: Target, session: TargetSession, ids: Sequence[int]) -> None:
    target.verify([VerifyRows(session, ids, EMPTY_PROPOSAL, last_row_only=True)])
    session.keep(range(len(ids)))


def _logits(target: Target, session: TargetSession, text: Sequence[int], drafts: Proposal) -> torch.Tensor:
    return target.verify([VerifyRows(session, text[:1], drafts)])[0].logits


def _one_by_one(target: Target, session: TargetSession, text: list[int]) -> torch.Tensor:
    """Returns the logits (rows, V) of one-row passes. Mutates: session, which then holds the text."""
    rows = []
    for token in text:
        rows.append(_logits(target, session, [token], EMPTY_PROPOSAL))
        session.keep([0])
    return torch.cat(rows)


def _branches(target: Target, session: TargetSession, text: list[int]) -> list[torch.Tensor]:
    """Returns the logits of the text's first rows on a branch of each tree; none where only chains are taken."""
    try:
        return [
            _logits(target, session, text, _grow(text, parents, path))[list(path)]
            for parents, path in PROBE_TREES
        ]
    except UnsupportedTargetError:
        return []


def _grow(text: list[int], parents: tuple[int, ...], path: tuple[int, ...]) -> Proposal:
    """Returns a tree that spells the text along the rows of `path`, with decoys elsewhere."""
    rows = range(1, len(parents) + 1)
    return Proposal(tuple(text[path.index(row) if row in path else -1] for row in rows), parents)


def _keep_to_themselves(
    target: Target, sessions: Sequence[TargetSession], ids: list[int], *, has_trees: bool
) -> bool:
    """Whether a chain, a lone row and a tree of three sessions have the bits that each has alone."""
    tree = _grow(ids, *PROBE_TREES[0]) if has_trees else Proposal.chain(ids[1:4])
    drafts = (Proposal.chain(ids[1:8]), EMPTY_PROPOSAL, tree)
    parts = [VerifyRows(session, ids[:1], p) for session, p in zip(sessions, drafts, strict=True)]
    together = target.verify(parts)
    alone = [target.verify([part])[0] for part in parts]
    return all(torch.equal(a.logits, b.logits) for a, b in zip(together, alone, strict=True))


def _agree(logits: torch.Tensor, lone: torch.Tensor) -> bool:
    """Whether as many first rows as both have are the same bits."""
    shared = min(len(logits), len(lone))
    return torch.equal(logits[:shared], lone[:shared])
