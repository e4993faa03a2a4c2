"""What is installed, from metadata alone: nothing is imported here."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from meshcore.errors import BackendConflictError, BackendNotFoundError
from meshcore.hookspecs import ENTRY_POINT_GROUP

CORE_DISTRIBUTION = "meshcore-train"
ALLOW_LIST_VARIABLE = "MESHCORE_BACKENDS"

BUILT_IN = MappingProxyType({"numpy": "meshcore.reference", "null": "meshcore.null"})
_OURS = MappingProxyType({"torch": "meshcore-backend-torch", "jax": "meshcore-backend-jax"})

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """What is known of an installed backend.

    Attributes:
        name: the name to give to ``create_backend``.
        distribution: the distribution that offers it ("a, b" where two do).
        version: that distribution's version; "unknown" where its metadata has none.
        entry_point: the module that is imported when the backend is loaded.
        status: "found" (metadata read, nothing imported), "ready" (loaded and accepted), "broken"
            (its import or its description failed), "rejected" (it loads and is no plugin that fits,
            or two distributions offer it).
        reason: why it is broken or rejected; else empty.
        api: the backend API that it was written for, once known.
        summary: its own one line for people, once known.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: str = "found"
    reason: str = ""
    api: tuple[int, int] | None = None
    summary: str = ""

    def __str__(self) -> str:
        return (
            f"backend {self.name!r} (entry point {self.name} = {self.entry_point} of "
            f"{self.distribution} {self.version})"
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """One entry point of one distribution."""

    name: str
    value: str
    distribution: str
    version: str

    def describe(self) -> BackendDescription:
        """The description before anything is imported."""
        return BackendDescription(self.name, self.distribution, self.version, self.value)

    def entry_point(self) -> importlib.metadata.EntryPoint:
        """What loads it."""
        return importlib.metadata.EntryPoint(self.name, self.value, ENTRY_POINT_GROUP)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.value})"


def installed_entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points of all installed distributions."""
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def collect(
    entry_points: Iterable[importlib.metadata.EntryPoint],
) -> Mapping[str, Sequence[Offer]]:
    """Name -> its distinct offers, sorted; more than one is a conflict.

    A distribution that is listed twice (an editable install beside its build folder) counts once,
    and the first listing wins, as it does for imports.
    """
    found: dict[str, dict[tuple[str, str], Offer]] = {}
    # The built-ins come last: they count only where the core's own metadata does not list them (a
    # source tree that is not installed).
    for offer in (*map(_offer, entry_points), *_built_in_offers()):
        key = (normalized(offer.distribution), offer.value)
        found.setdefault(offer.name, {}).setdefault(key, offer)
    return {name: sorted(found[name].values(), key=str) for name in sorted(found)}


def allow_list() -> tuple[str, ...] | None:
    """Names in ``MESHCORE_BACKENDS`` (comma-separated); None where it is unset or empty."""
    names = (name.strip() for name in os.environ.get(ALLOW_LIST_VARIABLE, "").split(","))
    return tuple(name for name in names if name) or None


def is_allowed(name: str) -> bool:
    """Whether the allow-list lets a backend through; the built-in ones always pass."""
    allowed = allow_list()
    return allowed is None or name in allowed or name in BUILT_IN


def normalized(distribution: str) -> str:
    """The form in which names of distributions are equal (``A.b_c`` and ``a-b-c``)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def field(distribution: importlib.metadata.Distribution, key: str) -> str:
    """A field of a distribution's metadata; "unknown" where it has none.

    A half-removed distribution has entry points and no METADATA file, and reading that fails in
    several ways; it is listed as unknown, so that the others are listed at all.
    """
    try:
        return distribution.metadata[key] or _UNKNOWN
    except (TypeError, KeyError, OSError):
        return _UNKNOWN


def conflict(offers: Sequence[Offer]) -> BackendConflictError:
    """The error for several offers of one name, the same whatever their order."""
    name = offers[0].name
    return BackendConflictError(
        f"backend {name!r} is offered by {' and by '.join(map(str, offers))}; one name belongs to "
        "one distribution: uninstall the one that you do not want"
    )


def not_found(name: object, installed: Iterable[str]) -> BackendNotFoundError:
    """The error for a name that nothing installed has, or that the allow-list hides."""
    names = sorted(installed)
    if name in names:
        return BackendNotFoundError(
            f"backend {name!r} is installed, and {ALLOW_LIST_VARIABLE}="
            f"{os.environ.get(ALLOW_LIST_VARIABLE)!r} does not list it; add it there, or unset "
            "the variable"
        )
    visible = [known for known in names if is_allowed(known)]
    text = f"no backend is called {name!r}; installed are {', '.join(visible)}"
    close = difflib.get_close_matches(str(name).lower(), {*visible, *_OURS}, n=2)
    near = [known for known in close if known != name]
    if near:
        text += f"; did you mean {' or '.join(map(repr, near))}?"
    missing = [known for known in (str(name), *near) if known in _OURS and known not in names]
    if missing:
        text += f" `pip install {_OURS[missing[0]]}` adds {missing[0]!r}"
    return BackendNotFoundError(text)


def _offer(entry_point: importlib.metadata.EntryPoint) -> Offer:
    distribution = entry_point.dist
    name = _UNKNOWN if distribution is None else field(distribution, "Name")
    version = _UNKNOWN if distribution is None else field(distribution, "Version")
    return Offer(entry_point.name, entry_point.value, name, version)


def _built_in_offers() -> Iterable[Offer]:
    try:
        version = field(importlib.metadata.distribution(CORE_DISTRIBUTION), "Version")
    except importlib.metadata.PackageNotFoundError:
        version = _UNKNOWN
    return [Offer(name, value, CORE_DISTRIBUTION, version) for name, value in BUILT_IN.items()]
