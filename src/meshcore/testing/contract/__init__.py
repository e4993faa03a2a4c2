"""The cases of the contract, by theme: module-level functions of a backend that raise."""

from meshcore.testing.contract import (
    exchange,
    life,
    manager,
    moves,
    nbytes,
    norms,
    storage,
    sums,
    writes,
)
from meshcore.testing.contract.model import Case as Case

THEMES = (life, storage, moves, sums, writes, norms, exchange, nbytes, manager)
"""Modules with a tuple ``CASES``."""

CASES: tuple[Case, ...] = tuple(case for theme in THEMES for case in theme.CASES)
"""Every case."""
