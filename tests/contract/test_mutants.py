"""The contract catches every mutant, and says so with a comparison, not with a crash."""

import inspect
from collections.abc import Iterable, Iterator

import pytest

from meshcore.backend import Backend, TransferProfile
from meshcore.reference import NumpyBackend
from meshcore.spec import Memory
from meshcore.testing import CASES, MESH_CASES, Case, MeshCase, grid, run_case
from meshcore.testing.contract import THEMES
from meshcore.testing.mutants import MUTANTS, buffers, moves, scalars

SHELLS = TransferProfile(name="shells", shells=frozenset(Memory))
PROFILES = {buffers.ZerosKeepOldData: SHELLS}

# Some show only where there are replicas, or where the axes stand the other way round: meshes are
# tried from the most telling to the plainest until a case fails.
TELLING_FIRST = sorted(MESH_CASES, key=lambda case: -len(case.ids) * len(case.shape))


NOTICES = {
    "life.ranks_are_mesh_ids": scalars.LocalRanksAreSorted,
    "life.groups_are_made_for_axes_alone": scalars.OneRankMakesAGroup,
    "life.close_is_final_and_idempotent": scalars.GroupsOutliveClose,
    "storage.zeros_are_zero": buffers.ZerosTakeMore,
    "storage.buffers_are_independent": buffers.ZerosAreShared,
    "storage.to_numpy_gives_copies": buffers.ToNumpyGivesViews,
    "storage.reused_shell_is_zeroed": buffers.ZerosKeepOldData,
    "storage.reused_shell_is_overwritten": moves.GatherReversesShards,
    "storage.nothing_is_legal": scalars.NormOfNothingIsNaN,
    "storage.too_much_is_refused": buffers.LackOfMemoryHasNoName,
    "moves.gather_follows_mesh_order": moves.GatherSortsRanks,
    "moves.scatter_keeps_the_own_shard": moves.ShardsGoByPosition,
    "moves.every_form_of_gather": moves.GatherReversesShards,
    "moves.gather_keeps_every_bit": moves.GatherFlushesSubnormals,
    "moves.gather_rounds_before_it_travels": moves.GatherCutsBits,
    "moves.scatter_and_cast_at_once": moves.ShardsGoByPosition,
    "moves.cast_alone": moves.ScatterGivesViews,
    "moves.transfer_to_host_and_back": moves.TransferGivesItsSource,
    "moves.addends_survive_a_transfer": moves.AllReduceForgetsReplicas,
    "moves.source_and_result_are_apart": moves.GatherOfOneGivesItsSource,
    "moves.moves_in_flight_end_apart": moves.GatherSortsRanks,
    "moves.a_gather_can_be_repeated": moves.GatherOfOneGivesItsSource,
    "sums.reduce_scatter_sums_the_shard_axis": moves.SumIsAMean,
    "sums.reduce_path_sums_the_whole_mesh": moves.AllReduceForgetsReplicas,
    "sums.every_form_of_a_sum": moves.AddIsIgnored,
    "sums.replica_sum_adds_equal_shards": moves.TotalIsScaled,
    "sums.scale_multiplies_the_sum": moves.ScaleIsIgnored,
    "sums.scale_is_not_rounded_to_the_addends": moves.ScaleIsIgnored,
    "sums.add_accumulates_micro_batches": moves.SumSpoilsItsSource,
    "sums.sums_are_kept_in_float32": moves.SumsInSixteenBits,
    "sums.addends_are_unchanged_and_apart": moves.SumSpoilsItsSource,
    "sums.zero_addends_change_nothing": moves.AddIsIgnored,
    "writes.write_fills_a_range": buffers.WriteIsOffByOne,
    "writes.write_by_rank_leaves_absent_ranks_alone": buffers.WriteClearsAbsentRanks,
    "writes.write_alike_reaches_every_local_rank": buffers.WriteIsOffByOne,
    "writes.add_accumulates_in_place": buffers.AddOverwrites,
    "writes.write_casts_to_the_buffer": buffers.WriteCutsBits,
    "writes.write_copies_its_values": buffers.WriteKeepsItsValues,
    "writes.read_values_can_be_written": buffers.AddOverwrites,
    "writes.read_gives_a_range": buffers.ReadRunsToTheEnd,
    "writes.a_copied_read_outlives_its_buffer": buffers.CopiedReadIsAView,
    "writes.scale_multiplies_any_placement": buffers.ScaleReachesOneRank,
    "norms.every_element_counts_once": scalars.NormCountsCopies,
    "norms.only_valid_ranges_count": scalars.NormCountsPadding,
    "norms.nan_outside_the_ranges_is_no_matter": scalars.NormMasksTooLate,
    "norms.parts_add_up": scalars.NormCountsReplicas,
    "norms.large_elements_do_not_overflow": scalars.NormSquaresInFloat32,
    "norms.a_nonfinite_element_shows": scalars.NormSkipsNonfinite,
    "norms.the_norm_changes_nothing": scalars.NormSquaresInPlace,
    "exchange.every_rank_hears_every_rank": scalars.ExchangeDropsARank,
    "exchange.long_payloads_arrive_whole": scalars.ExchangeCutsPayloads,
    "exchange.rounds_do_not_mix": scalars.ExchangeDropsARank,
    "exchange.a_mapping_speaks_for_each_rank": scalars.ExchangeDropsARank,
    "nbytes.opened_bytes_follow_the_spec": buffers.ZerosTakeMore,
    "nbytes.moved_bytes_follow_the_spec": moves.MovesTakeMore,
    "nbytes.adding_takes_no_bytes": moves.MovesTakeMore,
    "nbytes.content_takes_no_bytes": buffers.WriteTakesMore,
    "nbytes.freed_bytes_are_gone_or_reserved": buffers.FreeLeaks,
    "nbytes.profile_is_pure_data": scalars.ProfileIsNoPureData,
    "manager.loaded_values_come_back": moves.GatherReversesShards,
    "manager.writes_reach_home_and_copies": buffers.AddOverwrites,
    "manager.gradients_are_summed_over_ranks": buffers.CopiedReadIsAView,
    "manager.overflow_on_one_rank_is_seen_by_all": scalars.NormSkipsNonfinite,
    "manager.low_precision_copies_of_a_master": moves.SumIsAMean,
    "manager.host_keeps_values": moves.TransferGivesItsSource,
    "manager.many_cycles_leave_no_byte": moves.GatherSortsRanks,
    "manager.null_predicts_every_byte": buffers.FreeLeavesUnannouncedShells,
    "manager.measured_peaks_are_the_ledgers": buffers.ZerosTakeMore,
}
"""For every case a mutant that it notices: a case that notices none checks nothing."""


def is_caught(mutant: type[NumpyBackend], cases: Iterable[Case], mesh_case: MeshCase) -> bool:
    return any(
        isinstance(error, AssertionError)
        for error in failures(mutant, PROFILES.get(mutant), cases, mesh_case)
    )


def failures(
    backend_class: type[NumpyBackend],
    profile: TransferProfile | None,
    cases: Iterable[Case],
    mesh_case: MeshCase,
) -> Iterator[Exception]:
    kept: dict[MeshCase, Backend] = {}
    for case in cases:
        try:
            run_case(case, mesh_case, lambda asked: backend_class(asked.roles(), profile), kept)
        except Exception as error:
            yield error


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_contract_catches(mutant):
    caught = any(is_caught(mutant, CASES, mesh_case) for mesh_case in TELLING_FIRST)
    assert caught, f"no case on any mesh noticed: {mutant.__doc__}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_notices_a_mutant(case):
    mutant = NOTICES[case.name]
    assert any(is_caught(mutant, [case], mesh_case) for mesh_case in TELLING_FIRST)


@pytest.mark.parametrize("profile", [None, SHELLS], ids=["own profile", "shells"])
def test_the_unmutated_backend_passes_what_catches_them(profile):
    assert list(failures(NumpyBackend, profile, CASES, grid((3, 0, 2, 1), 2, 2))) == []


def test_all_mutants_are_listed_and_differ():
    written = [
        value
        for module in (moves, buffers, scalars)
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, NumpyBackend)
        and value is not NumpyBackend
        and not name.startswith("_")
    ]
    assert set(written) == set(MUTANTS)
    assert len(MUTANTS) == len({mutant.__doc__ for mutant in MUTANTS})


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.__name__.rpartition(".")[2])
def test_every_case_of_a_theme_is_listed(theme):
    written = {
        value
        for name, value in vars(theme).items()
        if inspect.isfunction(value)
        and value.__module__ == theme.__name__
        and not name.startswith("_")
    }
    assert {case.function for case in theme.CASES} == written
