"""How fast this machine moves memory: the yardstick for passes that mostly read weights."""

from __future__ import annotations

from time import perf_counter

import torch

COPY_BYTES = 2**27
"""Of a copy: more than caches hold."""
NUM_COPIES = 5


def copy_rates(
    device: torch.device, num_bytes: int = COPY_BYTES, num_copies: int = NUM_COPIES
) -> tuple[float, ...]:
    """Returns bytes per second, read and written ones together, of copies within a device, one after the other.

    On a CPU with PyTorch's own threads, as many as a pass has. Memory for two copies is taken and given back.
    """
    source = torch.ones(num_bytes // 4, device=device)  # written: blank pages of a CPU are all one page
    copy = torch.empty_like(source)
    rates = []
    for _ in range(1 + num_copies):
        _wait(device)
        started = perf_counter()
        copy.copy_(source)
        _wait(device)
        rates.append(2 * source.nbytes / (perf_counter() - started))
    return tuple(rates[1:])  # the first one also asks the system for pages


def _wait(device: torch.device) -> None:
    """Waits until the device has done all it was given; a CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
