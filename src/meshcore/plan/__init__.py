"""Pure functions over names and ints that decide; nothing here touches a backend or an array."""

from meshcore.plan.packing import DEFAULT_CAPACITY_NUMEL, MODES, plan_chunks
from meshcore.plan.uniform import best_capacity

__all__ = ["DEFAULT_CAPACITY_NUMEL", "MODES", "best_capacity", "plan_chunks"]
