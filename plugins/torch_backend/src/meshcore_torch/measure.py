"""Choose forms of moves by timing them on the groups at hand."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from meshcore.backend import MoveForm, MoveKind, TransferProfile
from meshcore_torch.collectives import start_exchange_shards
from meshcore_torch.groups import Group, GroupSet
from meshcore_torch.profile import ALL_TO_ALL, PEERS

_SIZES_NBYTES = tuple(1 << power for power in range(12, 25, 2))  # 4 KiB to 16 MiB
_REPEATS = 7
_MIN_GAIN = 1.1  # another form has to be faster by this, or noise would choose it


def measured_profile(profile: TransferProfile, groups: GroupSet) -> str:
    """A profile as JSON whose sum over shards takes the faster form by size.

    Collective over the shard axis. Times are those of this rank, so that ranks may come to
    different profiles: they must agree on one.
    """
    sums = _by_size(groups.get("reduce"), (ALL_TO_ALL, PEERS))
    forms = {**profile.forms, MoveKind.REDUCE_SCATTER: sums}
    return replace(profile, name=f"{profile.name}-measured", forms=forms).to_json()


def _by_size(group: Group, forms: tuple[MoveForm, MoveForm]) -> tuple[MoveForm, ...]:
    """Forms by rising size: the second from the first size on, from which it stays the faster."""
    # All ranks measure all sizes, whatever they find: to stop early would leave peers waiting.
    times = {nbytes: _seconds(group, forms, nbytes) for nbytes in _SIZES_NBYTES}
    threshold = None
    for nbytes, (first, second) in reversed(times.items()):
        if second > first / _MIN_GAIN:
            break
        threshold = nbytes
    if threshold is None:
        return (forms[0],)
    if threshold == _SIZES_NBYTES[0]:
        return (forms[1],)
    return forms[0], replace(forms[1], from_nbytes=threshold)


def _seconds(group: Group, forms: tuple[MoveForm, MoveForm], nbytes: int) -> tuple[float, float]:
    """The shortest time of each form at one size, taken in turns."""
    count, index = len(group.ranks), group.ranks.index(dist.get_rank())
    numel = max(1, nbytes // count) * count
    whole = torch.zeros(numel, dtype=torch.uint8)
    scratch = torch.zeros(numel, dtype=torch.uint8)
    best = [float("inf"), float("inf")]
    for _ in range(_REPEATS):
        for i, form in enumerate(forms):
            began = time.perf_counter()
            with group.blame("measuring"):
                works, _ = start_exchange_shards(form.name, group, whole, scratch, index)
                for work in works:
                    work.wait()
            best[i] = min(best[i], time.perf_counter() - began)
    return best[0], best[1]
