"""The model of one link: ``T(nbytes) = alpha + beta * nbytes``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and inverse bandwidth of a mesh axis (Hockney, 1994).

    >>> Link(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9).seconds(1_000_000)
    0.00101
    """

    alpha_seconds: float
    beta_seconds_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Seconds that one message of ``nbytes`` takes."""
        return self.alpha_seconds + self.beta_seconds_per_byte * nbytes
