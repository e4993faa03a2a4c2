"""The numpy backend passes the contract, on more meshes than anybody else."""

from collections.abc import Sequence

from meshcore.backend import Backend, BackendOptions, MoveForm, Staging, TransferProfile
from meshcore.spec import Memory, MoveKind
from meshcore.testing import MESH_CASES, BackendContract, BackendHarness, MeshCase, grid, line

MORE_MESHES = (
    line(7, 3, 11),
    grid((5, 0, 3, 1, 4, 2), 2, 3),
    grid((5, 0, 3, 1, 4, 2), 2, 3, shard_first=True),
    MeshCase((3, 1, 0, 2), (2, 1, 2), ("shard", "spare", "replica"), replica_axis="replica"),
    MeshCase((4, 2), (1, 2), ("spare", "node"), shard_axis="node"),
)

BORROWED_PROFILE = TransferProfile(
    name="borrowed",
    dtypes=("float32", "bfloat16", "float8_e4m3fn", "int64"),
    forms={
        MoveKind.GATHER: (MoveForm("small"), MoveForm("large", 4096, (Staging("peers", "dst"),))),
        MoveKind.REDUCE_SCATTER: (MoveForm("peers", 0, (Staging("peers", "src"),)),),
        MoveKind.ALL_REDUCE: (MoveForm("whole", 0, (Staging("full", "dst", only_add=True),)),),
    },
    shells=frozenset({Memory.DEVICE}),
)


class NumpyHarness(BackendHarness):
    backend_name = "numpy"

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (*MESH_CASES, *MORE_MESHES)


class BorrowedProfileHarness(BackendHarness):
    """The numpy backend keeps shells and takes scratch where another's profile says so."""

    backend_name = "numpy"

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (line(0), line(2, 0, 1), grid((3, 0, 2, 1), 2, 2))

    def options(self) -> BackendOptions:
        return BackendOptions(profile=BORROWED_PROFILE)


class FewDtypesHarness(BackendHarness):
    """float32 is all that a backend must have; the rest is tried where it is listed."""

    backend_name = "numpy"

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (line(2, 0, 1),)

    def options(self) -> BackendOptions:
        return BackendOptions(profile=TransferProfile(name="few", dtypes=("float32",)))


class UnpoisonedHarness(BackendHarness):
    """Without a wrapper in between: the bare backend, on one mesh."""

    backend_name = "numpy"
    poison = False

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (grid((3, 0, 2, 1), 2, 2),)


class OwnDestinationHarness(BackendHarness):
    """A profile whose backend makes its destinations itself."""

    backend_name = "numpy"

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (line(2, 0, 1), grid((3, 0, 2, 1), 2, 2))

    def options(self) -> BackendOptions:
        return BackendOptions(profile=TransferProfile(name="owner", preallocates=False))


class TestNumpy(BackendContract):
    harness = NumpyHarness()


class TestNumpyWithBorrowedProfile(BackendContract):
    harness = BorrowedProfileHarness()


class TestNumpyWithFewDtypes(BackendContract):
    harness = FewDtypesHarness()


class TestNumpyUnpoisoned(BackendContract):
    harness = UnpoisonedHarness()


class TestNumpyMakingDestinations(BackendContract):
    harness = OwnDestinationHarness()


def test_the_profile_reaches_the_backend() -> None:
    backend: Backend = BorrowedProfileHarness().create(line(0, 1))
    assert backend.profile == BORROWED_PROFILE
