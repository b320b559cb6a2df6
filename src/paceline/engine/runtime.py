"""Device, dtype and what the arithmetic of this machine keeps: the only file that says "cuda".

Row invariance is a property of kernels, so it is measured, not assumed: the same tokens are run one at a time and in
passes of several widths, and the logits are compared bit by bit.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.target.base import Target, TargetSession, VerifyRows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
CACHE_VARIABLE = "PACELINE_CACHE"
PROBE_WIDTHS = (2, 3, 5, 8, 11, 16, 22, 32)
PROBE_LENGTHS, PROBE_ROWS = (96, 187, 251, 316, 505), 3


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


def default_tree_nodes(device: torch.device, dtype: torch.dtype) -> int | None:
    """Returns the nodes of a draft tree that pay when nobody says otherwise, `None` for chains.

    A tree's branches sum their keys in another order than plain decoding does. In bfloat16 that flips near-ties often
    enough to change texts, so there chains are drafted, whose rows keep their bits. In float32 a flip takes two logits
    equal to about six digits. On a CPU each row costs a few percent of a pass; on CUDA it is nearly free.
    """
    if dtype is torch.bfloat16:
        return None
    return 15 if device.type == "cuda" else 5


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


@dataclass(frozen=True, slots=True)
class RowProbe:
    """Whether a row's logits depend on the rows that travel with it.

    Args:
        widths: pass widths that were compared with one-row passes.
        differing: those of them whose logits differ in any bit.
    """

    widths: tuple[int, ...]
    differing: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all widths agree bit by bit."""
        return not self.differing

    @property
    def verdict(self) -> str:
        """In words."""
        return "bit-exact" if self.is_exact else "equal up to near-ties"


def probe_rows(target: Target, widths: Sequence[int] = PROBE_WIDTHS) -> RowProbe:
    """Returns which pass widths change a row's bits on this machine, in a few seconds.

    At several context lengths, some just below a length at which kernels change, the same tokens follow one by one
    and in passes of each width. Every row is compared at the first length, where the last rows of a pass may round
    otherwise; the first rows at the others.
    """
    rng = random.Random(7)
    lengths = [length for length in PROBE_LENGTHS if length + max(widths) < target.spec.max_positions]
    ids = [rng.randrange(target.spec.vocab_size) for _ in range(max(lengths) + max(widths))]
    session = target.open(len(ids))
    differing: set[int] = set()
    try:
        for length in lengths:
            piece = ids[session.length : length]
            target.verify([VerifyRows(session, piece, EMPTY_PROPOSAL, last_row_only=True)])
            session.keep(range(len(piece)))
            num_rows = max(widths) if length == lengths[0] else PROBE_ROWS
            differing |= _differing(target, session, ids[length:], widths, num_rows)
    finally:
        session.close()
    return RowProbe(tuple(widths), tuple(sorted(differing)))


def _differing(
    target: Target, session: TargetSession, ids: Sequence[int], widths: Sequence[int], num_rows: int
) -> set[int]:
    """Returns the widths of which one of the first `num_rows` rows differs from its one-row pass. Mutates: session."""
    parts = {w: VerifyRows(session, ids[:1], Proposal.chain(list(ids[1:w]))) for w in widths}
    wide = {w: target.verify([part])[0].logits[:num_rows] for w, part in parts.items()}
    lone = []
    for token in ids[:num_rows]:
        (output,) = target.verify([VerifyRows(session, [token], EMPTY_PROPOSAL)])
        session.keep([0])
        lone.append(output.logits)
    single = torch.cat(lone)
    return {w for w, logits in wide.items() if not torch.equal(logits, single[: logits.shape[0]])}
