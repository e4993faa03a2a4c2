"""Import one backend plugin and decide whether it fits.

[Note: one plugin manager a backend] Every plugin gets a ``pluggy.PluginManager`` of its own. A
plugin that fails validation is thrown away together with its manager, so there is nothing to roll
back (pluggy 1.6.0 keeps a failed plugin registered), a misspelled hook in one plugin is no concern
of the others, and no plugin can answer for the name of another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pluggy

from meshcore import hookspecs
from meshcore.backend import BACKEND_API, BackendInfo
from meshcore.errors import BackendIncompatibleError, BackendLoadError
from meshcore.registry.discovery import CORE_DISTRIBUTION, BackendDescription, Offer


@dataclass(frozen=True, slots=True)
class Plugin:
    """A loaded and accepted backend."""

    description: BackendDescription
    info: BackendInfo
    manager: pluggy.PluginManager


class RefusedError(Exception):
    """Why a plugin is not taken: a status, a reason, and the type of the error for the user."""

    def __init__(
        self,
        status: str,
        reason: str,
        error: type[BackendLoadError | BackendIncompatibleError] = BackendLoadError,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.error = error


def load(offer: Offer) -> Plugin:
    """Import a plugin and check its description, API version and hooks, in this order.

    The version comes before the hooks: a plugin for another API may well have other hooks, and then
    the version is the reason that helps.

    Raises:
        RefusedError: it does not load or does not fit; the cause, if any, is chained.
    """
    module = _import(offer)
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    try:
        manager.register(module, offer.value)
        info = _info(manager, offer)
        # Adding the specs now checks the hooks that are there; what has no spec is "pending".
        manager.add_hookspecs(hookspecs)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise RefusedError("rejected", f"its hooks do not fit: {_one_line(error)}") from error
    if info is None:
        raise RefusedError("rejected", "it has no hook meshcore_backend_info")
    if not manager.hook.meshcore_create_backend.get_hookimpls():
        raise RefusedError("rejected", "it has no hook meshcore_create_backend")
    description = replace(offer.describe(), status="ready", api=info.api, summary=info.summary)
    return Plugin(description, info, manager)


def _import(offer: Offer) -> object:
    try:
        return offer.entry_point().load()
    except (Exception, SystemExit) as error:  # whatever a plugin does at import is its own fault
        raise RefusedError("broken", f"it does not import: {shown(error)}") from error


def _info(manager: pluggy.PluginManager, offer: Offer) -> BackendInfo | None:
    """What the plugin says of itself, checked; None where it has no such hook."""
    hook = getattr(manager.hook, "meshcore_backend_info", None)
    if hook is None:
        return None
    try:
        answers = hook()
    except pluggy.HookCallError as error:
        raise RefusedError("rejected", f"its hooks do not fit: {_one_line(error)}") from error
    except Exception as error:
        raise RefusedError("broken", f"meshcore_backend_info failed: {shown(error)}") from error
    info = answers[0] if answers else None  # pluggy drops an answer that is None
    if not isinstance(info, BackendInfo):
        raise RefusedError(
            "rejected", f"meshcore_backend_info gives {info!r}; it must give one BackendInfo"
        )
    if info.name != offer.name:
        raise RefusedError(
            "rejected",
            f"it calls itself {info.name!r} and its entry point {offer.name!r}; the two names must "
            "be equal",
        )
    _check_api(info, offer)
    return info


def _check_api(info: BackendInfo, offer: Offer) -> None:
    try:
        major, minor = (int(part) for part in info.api)
    except (TypeError, ValueError):
        raise RefusedError(
            "rejected", f"its api is {info.api!r}; it must be two ints like {BACKEND_API}"
        ) from None
    ours = version_text(BACKEND_API)
    if major == BACKEND_API[0] and minor <= BACKEND_API[1]:
        return
    older = (major, minor) < BACKEND_API
    upgrade = offer.distribution if older else CORE_DISTRIBUTION
    raise RefusedError(
        "rejected",
        f"it was built for backend API {major}.{minor} and {CORE_DISTRIBUTION} here has {ours} "
        f"(same major and no newer minor fits); upgrade {upgrade}",
        BackendIncompatibleError,
    )


def version_text(api: tuple[int, int]) -> str:
    """A backend API version as text.

    >>> version_text((1, 0))
    '1.0'
    """
    return f"{api[0]}.{api[1]}"


def shown(error: BaseException) -> str:
    """Type and message of an error on one line."""
    return f"{type(error).__name__}: {_one_line(error)}".rstrip(": ")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
