"""Distributed training memory for PyTorch and JAX: meshes, chunks, exact accounting.

>>> import meshcore as mc
>>> mesh = mc.DeviceMesh(range(3))
>>> plan = mc.plan_chunks([mc.ParamSpec("w", (4, 2))], shards=3)
>>> with mc.ChunkManager(mc.create_backend("numpy", mesh), plan) as manager:
...     manager.load({"w": [[0, 1], [2, 3], [4, 5], [6, 7]]})
...     with manager.gathered("w") as values:
...         print(values["w"].sum())
28.0
"""

from meshcore.backend import BACKEND_API as BACKEND_API
from meshcore.backend import BackendInfo as BackendInfo
from meshcore.backend import BackendOptions as BackendOptions
from meshcore.backend import TransferProfile as TransferProfile
from meshcore.errors import AuditError as AuditError
from meshcore.errors import BackendConflictError as BackendConflictError
from meshcore.errors import BackendError as BackendError
from meshcore.errors import BackendIncompatibleError as BackendIncompatibleError
from meshcore.errors import BackendLoadError as BackendLoadError
from meshcore.errors import BackendNotFoundError as BackendNotFoundError
from meshcore.errors import BrokenBufferError as BrokenBufferError
from meshcore.errors import ChunkBusyError as ChunkBusyError
from meshcore.errors import ClosedError as ClosedError
from meshcore.errors import DeviceMemoryError as DeviceMemoryError
from meshcore.errors import DtypeMismatchError as DtypeMismatchError
from meshcore.errors import DuplicateNameError as DuplicateNameError
from meshcore.errors import FrozenTensorError as FrozenTensorError
from meshcore.errors import GroupClosedError as GroupClosedError
from meshcore.errors import LedgerError as LedgerError
from meshcore.errors import MeshcoreError as MeshcoreError
from meshcore.errors import MeshError as MeshError
from meshcore.errors import MeshNameError as MeshNameError
from meshcore.errors import MissingExtraError as MissingExtraError
from meshcore.errors import NoGradientError as NoGradientError
from meshcore.errors import NotGatheredError as NotGatheredError
from meshcore.errors import NotInMeshError as NotInMeshError
from meshcore.errors import PeerError as PeerError
from meshcore.errors import PlanMismatchError as PlanMismatchError
from meshcore.errors import ShapeMismatchError as ShapeMismatchError
from meshcore.errors import SpecError as SpecError
from meshcore.errors import StateTransitionError as StateTransitionError
from meshcore.errors import UnknownTensorError as UnknownTensorError
from meshcore.errors import UnsupportedDtypeError as UnsupportedDtypeError
from meshcore.errors import UnusedGradientError as UnusedGradientError
from meshcore.errors import ValueUnavailableError as ValueUnavailableError
from meshcore.layout import ChunkLayout as ChunkLayout
from meshcore.layout import ChunkPlan as ChunkPlan
from meshcore.layout import ParamSpec as ParamSpec
from meshcore.layout import Slot as Slot
from meshcore.ledger import Category as Category
from meshcore.ledger import Ledger as Ledger
from meshcore.ledger import MemoryReport as MemoryReport
from meshcore.links import Link as Link
from meshcore.manager import Access as Access
from meshcore.manager import AuditReport as AuditReport
from meshcore.manager import ChunkManager as ChunkManager
from meshcore.manager import ChunkUpdate as ChunkUpdate
from meshcore.mesh import DeviceMesh as DeviceMesh
from meshcore.mesh_manager import DeviceMeshInfo as DeviceMeshInfo
from meshcore.mesh_manager import DeviceMeshManager as DeviceMeshManager
from meshcore.plan import plan_chunks as plan_chunks
from meshcore.registration import TensorRegistry as TensorRegistry
from meshcore.registry import BackendDescription as BackendDescription
from meshcore.registry import available_backends as available_backends
from meshcore.registry import create_backend as create_backend
from meshcore.spec import AxisRoles as AxisRoles
from meshcore.spec import BufferSpec as BufferSpec
from meshcore.spec import Memory as Memory
from meshcore.spec import Placement as Placement
from meshcore.state import TensorState as TensorState

__version__ = "0.1.0"

__all__ = [
    "BACKEND_API",
    "Access",
    "AuditError",
    "AuditReport",
    "AxisRoles",
    "BackendConflictError",
    "BackendDescription",
    "BackendError",
    "BackendIncompatibleError",
    "BackendInfo",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendOptions",
    "BrokenBufferError",
    "BufferSpec",
    "Category",
    "ChunkBusyError",
    "ChunkLayout",
    "ChunkManager",
    "ChunkPlan",
    "ChunkUpdate",
    "ClosedError",
    "DeviceMemoryError",
    "DeviceMesh",
    "DeviceMeshInfo",
    "DeviceMeshManager",
    "DtypeMismatchError",
    "DuplicateNameError",
    "FrozenTensorError",
    "GroupClosedError",
    "Ledger",
    "LedgerError",
    "Link",
    "Memory",
    "MemoryReport",
    "MeshError",
    "MeshNameError",
    "MeshcoreError",
    "MissingExtraError",
    "NoGradientError",
    "NotGatheredError",
    "NotInMeshError",
    "ParamSpec",
    "PeerError",
    "Placement",
    "PlanMismatchError",
    "ShapeMismatchError",
    "Slot",
    "SpecError",
    "StateTransitionError",
    "TensorRegistry",
    "TensorState",
    "TransferProfile",
    "UnknownTensorError",
    "UnsupportedDtypeError",
    "UnusedGradientError",
    "ValueUnavailableError",
    "available_backends",
    "create_backend",
    "plan_chunks",
]
