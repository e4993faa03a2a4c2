"""The jax backend in the conformance tests: a harness for ``meshcore.testing.BackendContract``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcore import BackendOptions
from meshcore.testing import MESH_CASES, BackendHarness, MeshCase
from meshcore_jax.launch import emulate_cpu


class JaxHarness(BackendHarness):
    """All devices of one controller, in this process; CPU devices are emulated.

    Args:
        meshes: meshes to run every case on; the default is the contract's own.
        extra: options of the backend, for every mesh.

    Raises:
        MeshError: jax has started already with too few devices.
    """

    backend_name = "jax"

    def __init__(
        self,
        meshes: Sequence[MeshCase] = MESH_CASES,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._meshes = tuple(meshes)
        self._extra = dict(extra or {})
        emulate_cpu(max(case.world_size for case in self._meshes))

    def mesh_cases(self) -> Sequence[MeshCase]:
        """The meshes that were given."""
        return self._meshes

    def options(self) -> BackendOptions:
        """CPU devices, with the options that were given."""
        return BackendOptions(device="cpu", extra=self._extra)
