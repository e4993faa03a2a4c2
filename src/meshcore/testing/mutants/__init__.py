"""Backends that are wrong in one way each; the contract has to catch every one.

Each is the numpy backend with one verb changed; its docstring says what it does wrong. They keep
the contract honest: a case that is weakened lets one through.
"""

from meshcore.reference import NumpyBackend
from meshcore.testing.mutants import buffers, moves, scalars

MUTANTS: tuple[type[NumpyBackend], ...] = (
    moves.ScatterGivesViews,
    moves.GatherOfOneGivesItsSource,
    moves.TransferGivesItsSource,
    moves.MovesTakeMore,
    moves.SumSpoilsItsSource,
    moves.ScaleIsIgnored,
    moves.AddIsIgnored,
    moves.TotalIsScaled,
    moves.SumIsAMean,
    moves.GatherReversesShards,
    moves.GatherSortsRanks,
    moves.AllReduceForgetsReplicas,
    moves.SumsInSixteenBits,
    moves.GatherCutsBits,
    moves.GatherFlushesSubnormals,
    moves.ShardsGoByPosition,
    buffers.ZerosTakeMore,
    buffers.ZerosKeepOldData,
    buffers.ZerosAreShared,
    buffers.LackOfMemoryHasNoName,
    buffers.FreeLeaks,
    buffers.FreeLeavesUnannouncedShells,
    buffers.ToNumpyGivesViews,
    buffers.WriteLosesRanks,
    buffers.WriteClearsAbsentRanks,
    buffers.WriteIsOffByOne,
    buffers.AddOverwrites,
    buffers.WriteKeepsItsValues,
    buffers.ScaleReachesOneRank,
    buffers.WriteCutsBits,
    buffers.WriteTakesMore,
    buffers.ReadRunsToTheEnd,
    buffers.CopiedReadIsAView,
    scalars.NormCountsPadding,
    scalars.NormMasksTooLate,
    scalars.NormCountsReplicas,
    scalars.NormCountsCopies,
    scalars.NormSquaresInFloat32,
    scalars.NormSkipsNonfinite,
    scalars.NormSquaresInPlace,
    scalars.NormOfNothingIsNaN,
    scalars.ExchangeDropsARank,
    scalars.ExchangeCutsPayloads,
    scalars.GroupsOutliveClose,
    scalars.OneRankMakesAGroup,
    scalars.LocalRanksAreSorted,
    scalars.ProfileIsNoPureData,
)
"""All mutants."""
