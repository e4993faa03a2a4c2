"""The ledger: use is the sum over what is live, peaks are its maxima, and nothing is lost."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcore.errors import AuditError, LedgerError
from meshcore.ledger import Category, Entry, Ledger, empty_table, tabulate
from meshcore.spec import Memory

DEVICE, HOST = Memory.DEVICE, Memory.HOST

entries = st.builds(
    Entry,
    name=st.sampled_from(["a", "b"]),
    category=st.sampled_from(Category),
    memory=st.sampled_from(Memory),
    nbytes=st.integers(0, 1000),
)
# What to do, and with which of the buffers that are there (modulo their number).
actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "open", "open", "close", "reserve", "unreserve", "reset_peak", "external"]
        ),
        entries,
        st.integers(0, 99),
    ),
    max_size=40,
)


class Model:
    """The same, kept naively: what is live, and every state of it since the peaks were reset."""

    def __init__(self):
        self.live, self.shells, self.history = {}, {}, []
        self.note()

    def note(self):
        self.history.append(table_of(self.live.values()))

    def peak(self):
        peak = {}
        for memory in Memory:
            rows = [state[memory.value] for state in self.history]
            peak[memory.value] = {
                **{
                    category.value: max(row[category.value] for row in rows)
                    for category in Category
                },
                "total": max(sum(row.values()) for row in rows),
            }
        return peak


def table_of(live):
    return {
        memory.value: {
            category.value: sum(
                e.nbytes for e in live if e.memory is memory and e.category is category
            )
            for category in Category
        }
        for memory in Memory
    }


@given(actions)
def test_totals_are_the_sum_over_the_live_buffers_and_peaks_their_maxima(script):
    ledger, model, keys = Ledger(), Model(), itertools.count()
    with contextlib.ExitStack() as scopes:
        for action, entry, pick in script:
            live = [key for key in model.live if key >= 0]
            shells = list(model.shells)
            if action == "open":
                key = next(keys)
                ledger.open(key, entry)
                model.live[key] = entry
            elif action == "close" and live:
                key = live[pick % len(live)]
                ledger.close(key)
                del model.live[key]
            elif action == "reserve":
                key = next(keys)
                ledger.reserve(key, entry)
                model.shells[key] = entry
            elif action == "unreserve" and shells:
                key = shells[pick % len(shells)]
                ledger.unreserve(key)
                del model.shells[key]
            elif action == "external":
                scopes.enter_context(ledger.external("scope", entry.nbytes, entry.memory))
                outside = Entry("scope", Category.EXTERNAL, entry.memory, entry.nbytes)
                model.live[-1 - next(keys)] = outside
            elif action == "reset_peak":
                ledger.reset_peak()
                model.history.clear()
            model.note()
            report = ledger.report()
            assert report.used == table_of(model.live.values())
            assert report.reserved == table_of(model.shells.values())
            assert report.peak == model.peak()
            for memory in Memory:
                assert ledger.used_nbytes(memory) == sum(report.used[memory.value].values())
                assert ledger.reserved_nbytes(memory) == sum(report.reserved[memory.value].values())
            ledger.check()
        assert {k: e for k, e in ledger.live().items() if k >= 0} == {
            k: e for k, e in model.live.items() if k >= 0
        }
    # The scopes are over: what they counted is gone, and only that.
    kept = [entry for key, entry in model.live.items() if key >= 0]
    assert ledger.report().used == table_of(kept)


def test_tables_have_all_keys():
    table = empty_table()
    assert set(table) == {"device", "host"}
    for row in table.values():
        assert row == dict.fromkeys(["param", "grad", "optimizer", "staging", "external"], 0)
    report = Ledger().report()
    assert report.used == report.reserved == table
    assert all(set(report.peak[memory]) == {*table[memory], "total"} for memory in table)
    assert tabulate([Entry("w", Category.GRAD, HOST, 3)])["host"]["grad"] == 3


def test_the_peak_of_all_is_not_the_sum_of_the_peaks():
    ledger = Ledger()
    ledger.open(1, Entry("w", Category.PARAM, DEVICE, 10))
    ledger.close(1)
    ledger.open(2, Entry("w", Category.GRAD, DEVICE, 7))
    peak = ledger.report().peak["device"]
    assert (peak["param"], peak["grad"], peak["total"]) == (10, 7, 10)
    ledger.reset_peak()
    peak = ledger.report().peak["device"]
    assert (peak["param"], peak["grad"], peak["total"]) == (0, 7, 7)


def test_a_report_and_the_live_set_are_snapshots():
    ledger = Ledger()
    ledger.open(1, Entry("w", Category.PARAM, DEVICE, 10))
    report, live = ledger.report(), ledger.live()
    ledger.close(1)
    assert report.used["device"]["param"] == 10
    assert list(live) == [1]
    report.peak["device"]["param"] = 99
    assert ledger.report().peak["device"]["param"] == 10


def test_external_memory_is_counted_while_its_scope_is_open_even_if_it_fails():
    ledger = Ledger()
    with ledger.external("activations", 100), ledger.external("more", 20, HOST):
        assert ledger.used_nbytes(DEVICE) == 100
        assert ledger.report().used["host"]["external"] == 20
        assert sorted(entry.name for entry in ledger.live().values()) == ["activations", "more"]
    with pytest.raises(KeyError), ledger.external("activations", 30):  # noqa: PT012  # two lines show what the scope saw
        assert ledger.used_nbytes(DEVICE) == 30
        raise KeyError
    assert ledger.live() == {}
    assert ledger.report().used == empty_table()
    assert ledger.report().peak["device"]["external"] == 100


def test_scopes_may_end_in_any_order():
    ledger = Ledger()
    first, second = ledger.external("first", 1), ledger.external("second", 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ledger.used_nbytes(DEVICE) == 2
    second.__exit__(None, None, None)
    assert ledger.used_nbytes(DEVICE) == 0


# Errors


def test_a_buffer_is_opened_and_closed_once():
    ledger, entry = Ledger(), Entry("w", Category.PARAM, DEVICE, 10)
    ledger.open(1, entry)
    with pytest.raises(LedgerError, match=r"buffer 'w' \(key 1\) is open already"):
        ledger.open(1, entry)
    assert ledger.used_nbytes(DEVICE) == 10
    ledger.close(1)
    for key in (1, 2):
        with pytest.raises(LedgerError, match=f"key {key} is not open"):
            ledger.close(key)
    assert ledger.report().used == empty_table()


def test_a_shell_is_reserved_and_taken_once():
    ledger, entry = Ledger(), Entry("w", Category.PARAM, HOST, 10)
    ledger.reserve(1, entry)
    with pytest.raises(LedgerError, match="is open already"):
        ledger.reserve(1, entry)
    assert ledger.reserved_nbytes(HOST) == 10
    ledger.unreserve(1)
    with pytest.raises(LedgerError, match="key 1 is not open"):
        ledger.unreserve(1)
    assert ledger.reserved_nbytes(HOST) == 0


def test_external_memory_is_not_negative():
    ledger = Ledger()
    with (
        pytest.raises(LedgerError, match="'activations' has 0 or more bytes, not -1"),
        ledger.external("activations", -1),
    ):
        pytest.fail("the scope must not start")
    assert ledger.live() == {}


def test_check_finds_a_total_that_left_the_live_set():
    ledger = Ledger()
    ledger.open(1, Entry("w", Category.PARAM, DEVICE, 10))
    ledger.check()
    ledger._used["device"]["param"] += 1
    with pytest.raises(AuditError, match="'param': 11.* differ from the live set .*'param': 10"):
        ledger.check()


def test_check_finds_reserved_bytes_that_left_the_shells():
    ledger = Ledger()
    ledger.reserve(1, Entry("w", Category.PARAM, HOST, 10))
    ledger.check()
    ledger._reserved_nbytes[HOST] = 9
    with pytest.raises(AuditError, match="9 reserved bytes in host"):
        ledger.check()


# For people


def test_the_report_as_text_shows_what_is_or_was_there():
    ledger = Ledger()
    ledger.open(1, Entry("w", Category.PARAM, DEVICE, 2048))
    ledger.open(2, Entry("w", Category.GRAD, DEVICE, 1024))
    ledger.close(2)
    ledger.reserve(3, Entry("w", Category.STAGING, HOST, 12))
    lines = [" ".join(line.split()) for line in str(ledger.report()).splitlines()]
    assert lines == [
        "memory category used reserved peak",
        "device param 2.00 KiB 0 B 2.00 KiB",
        "device grad 0 B 0 B 1.00 KiB",
        "device total 2.00 KiB 0 B 3.00 KiB",
        "host staging 0 B 12 B 0 B",
        "host total 0 B 12 B 0 B",
    ]
