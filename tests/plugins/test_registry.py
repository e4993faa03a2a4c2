"""Discovery, loading and negotiation of backend plugins."""

from __future__ import annotations

import importlib.metadata
import sys

import numpy as np
import pluggy
import pytest

from meshcore.backend import BACKEND_API, BackendOptions
from meshcore.errors import (
    BackendConflictError,
    BackendError,
    BackendIncompatibleError,
    BackendLoadError,
    BackendNotFoundError,
    MeshError,
    SpecError,
)
from meshcore.mesh import DeviceMesh
from meshcore.registry import (
    Registry,
    available_backends,
    create_backend,
    default_registry,
    default_shard_axis,
    discovery,
)

MESH = DeviceMesh([1, 0])

BROKEN = "import a_module_that_is_nowhere\n"

UNKNOWN_ARGUMENT = """
    from meshcore.backend import BackendInfo
    from meshcore.hookspecs import hookimpl

    @hookimpl
    def meshcore_backend_info():
        return BackendInfo("odd", (1, 0))

    @hookimpl
    def meshcore_create_backend(name, roles, options, colour):
        return object()
"""

MISSPELLED = """
    from meshcore.backend import BackendInfo
    from meshcore.hookspecs import hookimpl

    @hookimpl
    def meshcore_backend_info():
        return BackendInfo("misspelled", (1, 0))

    @hookimpl
    def meshcore_crate_backend(name, roles, options):
        return object()
"""

TEMPLATE = """
    from meshcore.backend import BackendInfo
    from meshcore.hookspecs import hookimpl

    @hookimpl
    def meshcore_backend_info():
        {info}

    @hookimpl
    def meshcore_create_backend(name, roles, options):
        {create}
"""


def plugin(info='return BackendInfo("it", (1, 0))', create="return object()"):
    return TEMPLATE.replace("{info}", info).replace("{create}", create)


def statuses(registry):
    return {name: found.status for name, found in registry.describe().items()}


# --- listing ------------------------------------------------------------------------------------


def test_listing_reads_metadata_and_imports_nothing(site):
    module = site.good("toy", "toy-dist", version="3.1")
    site.bad("broken", "raise SystemExit('must not be imported')")
    found = site.registry().describe()
    assert sorted(found) == ["broken", "null", "numpy", "toy"]
    assert {d.status for d in found.values()} == {"found"}
    toy = found["toy"]
    assert (toy.distribution, toy.version, toy.entry_point) == ("toy-dist", "3.1", module)
    assert module not in sys.modules


def test_listing_cannot_be_changed(site):
    with pytest.raises(TypeError):
        site.registry().describe()["mine"] = None


def test_built_in_backends_are_there_without_metadata_of_the_core(site):
    registry = site.registry()
    found = registry.describe()
    assert {name: d.entry_point for name, d in found.items()} == {
        "null": "meshcore.null",
        "numpy": "meshcore.reference",
    }
    assert {d.distribution for d in found.values()} == {"meshcore-train"}
    assert registry.create("numpy", MESH).local_ranks == (1, 0)


def test_built_in_backends_are_listed_once_with_metadata_of_the_core(site):
    site.add("meshcore-train", {"numpy": "meshcore.reference", "null": "meshcore.null"}, "9.9")
    found = site.registry().describe()
    assert {name: (d.status, d.version) for name, d in found.items()} == {
        "null": ("found", "9.9"),
        "numpy": ("found", "9.9"),
    }


def test_a_second_listing_of_one_distribution_is_no_conflict(site):
    module = site.good("toy", "toy-dist", version="1.0")
    site.add("Toy_Dist", {"toy": module}, version="1.1")
    registry = site.registry()
    assert registry.describe()["toy"].status == "found"
    assert registry.create("toy", MESH).module == module


def test_a_distribution_without_metadata_is_listed_and_disturbs_nobody(site):
    module = site.module("")
    site.add("half-removed", {"half": module}, metadata=False)
    site.good("toy")
    found = site.registry().describe()
    assert found["half"].version == "unknown"
    assert found["toy"].version == "1.0"


def test_default_registry_lists_what_is_installed():
    found = available_backends()
    assert found["numpy"].entry_point == "meshcore.reference"
    assert found["null"].distribution == "meshcore-train"
    assert default_registry() is default_registry()


# --- good ---------------------------------------------------------------------------------------


def test_create_loads_only_the_backend_that_is_asked_for(site):
    toy, other = site.good("toy"), site.good("other")
    registry = site.registry()
    options = BackendOptions(timeout_seconds=3.0)
    backend = registry.create("toy", MESH, options=options)
    assert (backend.name, backend.module, backend.options) == ("toy", toy, options)
    assert (backend.roles.mesh, backend.roles.shard_axis) == (MESH, "shard")
    assert backend.roles.replica_axis is None
    assert other not in sys.modules
    assert statuses(registry) == {
        "null": "found", "numpy": "found", "other": "found", "toy": "ready",
    }  # fmt: skip
    described = registry.describe()["toy"]
    assert (described.api, described.summary, described.reason) == ((1, 0), "good", "")


def test_a_loaded_backend_is_not_loaded_again(site):
    module = site.good("toy")
    registry = site.registry()
    registry.create("toy", MESH)
    loaded = sys.modules.pop(module)
    assert registry.create("toy", MESH).module == loaded.__name__
    assert module not in sys.modules


def test_two_registries_share_nothing(site):
    site.good("toy")
    first, second = site.registry(), site.registry()
    first.load("toy")
    assert (statuses(first)["toy"], statuses(second)["toy"]) == ("ready", "found")


def test_axes_are_handed_on_by_name(site):
    site.good("toy")
    mesh = DeviceMesh(range(4), (2, 2), ("replica", "shard"))
    roles = site.registry().create("toy", mesh, shard_axis=1, replica_axis=0).roles
    assert (roles.shard_axis, roles.replica_axis) == ("shard", "replica")


def test_create_backend_makes_a_working_numpy_backend():
    backend = create_backend("numpy", MESH, shard_axis="shard", replica_axis=None)
    assert backend.exchange(b"x") == {1: b"x", 0: b"x"}
    backend.close()


@pytest.mark.parametrize(
    ("names", "replica", "expected"),
    [
        (("shard",), None, "shard"),
        (("data",), None, "data"),
        (("shard", "other"), None, "shard"),
        (("replica", "data"), "replica", "data"),
        (("replica", "data"), 0, "data"),
        (("replica", "shard", "x"), "replica", "shard"),
    ],
)
def test_default_shard_axis(names, replica, expected):
    mesh = DeviceMesh(range(2 ** len(names)), [2] * len(names), names)
    assert default_shard_axis(mesh, replica) == expected


def test_default_shard_axis_must_be_clear():
    mesh = DeviceMesh(range(4), (2, 2), ("a", "b"))
    with pytest.raises(MeshError, match=r"\['a', 'b'\].*name one"):
        default_shard_axis(mesh)
    with pytest.raises(MeshError, match="name one"):
        create_backend("numpy", mesh)


def test_axes_are_checked_before_anything_is_imported(site):
    module = site.good("toy")
    with pytest.raises(MeshError, match="'q'"):
        site.registry().create("toy", MESH, shard_axis="q")
    assert module not in sys.modules


# --- not found ----------------------------------------------------------------------------------


def test_unknown_name_says_what_is_installed_and_what_is_close(site):
    site.good("toyota")
    with pytest.raises(BackendNotFoundError, match="installed are null, numpy, toyota") as caught:
        site.registry().create("toyata", MESH)
    assert "did you mean 'toyota'?" in str(caught.value)
    assert "pip install" not in str(caught.value)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("asked", ["torch", "jax", "Torch", "jaxx"])
def test_our_own_backends_come_with_what_to_install(site, asked):
    name = asked.lower()[:5] if asked.lower().startswith("torch") else "jax"
    with pytest.raises(BackendNotFoundError, match=f"pip install meshcore-backend-{name}`"):
        site.registry().create(asked, MESH)


def test_an_installed_backend_is_not_offered_for_installation(site):
    site.good("torch")
    with pytest.raises(BackendNotFoundError) as caught:
        site.registry().create("torsh", MESH)
    assert "'torch'" in str(caught.value)
    assert "pip" not in str(caught.value)


def test_a_backend_that_is_installed_later_is_found(site):
    registry = site.registry()
    with pytest.raises(BackendNotFoundError):
        registry.create("late", MESH)
    site.good("late")
    assert registry.create("late", MESH).name == "late"


# --- broken, rejected ---------------------------------------------------------------------------


def test_good_broken_and_rejected_side_by_side(site):
    site.good("good")
    site.bad("broken", BROKEN)
    site.bad("odd", UNKNOWN_ARGUMENT)
    registry = site.registry()
    found = registry.load_all()
    assert {name: found[name].status for name in ("good", "broken", "odd", "numpy", "null")} == {
        "good": "ready", "broken": "broken", "odd": "rejected", "numpy": "ready", "null": "ready",
    }  # fmt: skip
    assert "a_module_that_is_nowhere" in found["broken"].reason
    assert "colour" in found["odd"].reason
    assert (found["broken"].distribution, found["broken"].version) == ("dist-broken", "2.5")
    assert registry.create("good", MESH).name == "good"
    assert registry.create("numpy", MESH).name == "numpy"


def test_asking_for_a_broken_backend_chains_the_cause(site):
    module = site.bad("broken", BROKEN)
    with pytest.raises(BackendLoadError, match=rf"broken = {module} of dist-broken 2\.5") as caught:
        site.registry().create("broken", MESH)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "a_module_that_is_nowhere"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise SystemExit(3)", SystemExit),
        ("raise RuntimeError('no licence')", RuntimeError),
        ("1 +", SyntaxError),
    ],
)
def test_whatever_an_import_raises_is_a_load_error(site, source, cause):
    site.bad("it", source)
    registry = site.registry()
    with pytest.raises(BackendLoadError, match=cause.__name__) as caught:
        registry.load("it")
    assert isinstance(caught.value.__cause__, cause)
    assert statuses(registry)["it"] == "broken"


@pytest.mark.parametrize("value", ["not a module!", "json:nothing_here"])
def test_an_entry_point_that_leads_nowhere_is_broken(site, value):
    site.add("nowhere", {"it": value})
    registry = site.registry()
    with pytest.raises(BackendLoadError, match=r"nowhere 1\.0"):
        registry.load("it")
    assert statuses(registry)["it"] == "broken"


def test_an_unknown_hook_argument_is_rejected_with_its_name(site):
    site.bad("odd", UNKNOWN_ARGUMENT)
    with pytest.raises(BackendLoadError, match="colour") as caught:
        site.registry().create("odd", MESH)
    assert isinstance(caught.value.__cause__, pluggy.PluginValidationError)


def test_a_misspelled_hook_is_rejected_and_concerns_nobody_else(site):
    site.bad("misspelled", MISSPELLED)
    site.good("good")
    registry = site.registry()
    with pytest.raises(BackendLoadError, match="meshcore_crate_backend"):
        registry.load("misspelled")
    assert registry.create("good", MESH).name == "good"
    assert statuses(registry)["misspelled"] == "rejected"


@pytest.mark.parametrize(
    ("source", "status", "match"),
    [
        ("", "rejected", "no hook meshcore_backend_info"),
        (plugin(info="return None"), "rejected", "gives None"),
        (plugin(info="return 'it'"), "rejected", "gives 'it'"),
        (plugin(info="return BackendInfo('other', (1, 0))"), "rejected", "'other'.*'it'"),
        (plugin(info="return BackendInfo('it', '1')"), "rejected", "two ints"),
        (plugin(info="return BackendInfo('it', 1)"), "rejected", "two ints"),
        (plugin(info="raise KeyError('deep')"), "broken", "KeyError.*deep"),
        (plugin().replace("_info():", "_info(what):"), "rejected", "what"),
        (plugin().split("@hookimpl\n    def meshcore_create")[0], "rejected", "_create_backend"),
    ],
)
def test_a_plugin_that_is_none_is_refused(site, source, status, match):
    site.bad("it", source)
    registry = site.registry()
    with pytest.raises(BackendLoadError, match=match):
        registry.load("it")
    found = registry.describe()["it"]
    assert (found.status, found.api) == (status, None)
    assert found.reason
    assert "entry point it =" not in found.reason


def test_after_a_rejection_the_name_is_free_again(site):
    module = site.bad("odd", UNKNOWN_ARGUMENT)
    registry = site.registry()
    with pytest.raises(BackendLoadError):
        registry.load("odd")
    fixed = UNKNOWN_ARGUMENT.replace(", colour", "")
    (site.folder / f"{module}.py").unlink()
    del sys.modules[module]
    site.add("dist-odd", {"odd": site.module(fixed)}, version="2.6")
    (site.folder / "dist_odd-2.5.dist-info" / "entry_points.txt").unlink()
    assert statuses(registry)["odd"] == "found"
    assert registry.load("odd").status == "ready"
    assert registry.describe()["odd"].version == "2.6"


def test_strict_mode_raises_at_load(site):
    site.bad("broken", BROKEN)
    with pytest.raises(BackendLoadError, match="nowhere"):
        site.registry(strict=True).load_all()
    with pytest.raises(BackendLoadError, match="nowhere"):
        site.registry().load_all(strict=True)
    assert site.registry(strict=True).load_all(strict=False)["broken"].status == "broken"


# --- API versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [
        ((BACKEND_API[0], BACKEND_API[1] + 1), "meshcore-train"),
        ((BACKEND_API[0] + 1, 0), "meshcore-train"),
        ((BACKEND_API[0] - 1, 99), "old-dist"),
    ],
)
def test_another_api_version_names_both_and_the_side_to_upgrade(site, api, upgrade):
    site.good("it", "old-dist", api=api)
    registry = site.registry()
    with pytest.raises(BackendIncompatibleError, match=f"upgrade {upgrade}$") as caught:
        registry.create("it", MESH)
    text = str(caught.value)
    assert f"{api[0]}.{api[1]}" in text
    assert f"{BACKEND_API[0]}.{BACKEND_API[1]}" in text
    assert "old-dist 1.0" in text
    assert statuses(registry)["it"] == "rejected"


def test_the_version_is_told_before_the_hooks(site):
    site.bad("odd", UNKNOWN_ARGUMENT.replace("(1, 0)", "(2, 0)"))
    with pytest.raises(BackendIncompatibleError, match=r"2\.0"):
        site.registry().load("odd")


# --- conflicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_two_distributions_with_one_name_are_both_named(site, order):
    first, second = site.good("twin", "a-dist"), site.good("twin", "b-dist", version="2.0")
    site.good("good")
    registry = Registry(lambda: site.entry_points()[::order])
    with pytest.raises(BackendConflictError, match=r"a-dist 1\.0.*b-dist 2\.0") as caught:
        registry.create("twin", MESH)
    assert {first, second}.isdisjoint(sys.modules)
    found = registry.describe()["twin"]
    assert (found.status, found.distribution) == ("rejected", "a-dist, b-dist")
    assert found.reason == str(caught.value)
    assert registry.create("good", MESH).name == "good"
    assert registry.create("numpy", MESH).name == "numpy"


def test_nobody_takes_the_name_of_a_built_in_backend(site):
    site.good("numpy", "impostor")
    registry = site.registry()
    with pytest.raises(BackendConflictError, match=r"impostor.*meshcore-train"):
        registry.create("numpy", MESH)
    assert registry.create("null", MESH).name == "null"


def test_a_plugin_answers_only_for_its_own_name(site):
    site.good("greedy")
    registry = site.registry()
    registry.load("greedy")
    assert type(registry.create("numpy", MESH)).__module__.startswith("meshcore.reference")


# --- allow-list ---------------------------------------------------------------------------------


def test_allow_list_hides_all_others_but_the_built_in_ones(site, monkeypatch):
    site.good("a")
    module = site.good("b")
    monkeypatch.setenv("MESHCORE_BACKENDS", " a ,zzz")
    registry = site.registry()
    assert sorted(registry.describe()) == ["a", "null", "numpy"]
    assert sorted(registry.describe(allowed_only=False)) == ["a", "b", "null", "numpy"]
    assert registry.create("a", MESH).name == "a"
    assert registry.create("null", MESH).name == "null"
    with pytest.raises(BackendNotFoundError, match=r"MESHCORE_BACKENDS=' a ,zzz'.*add it"):
        registry.create("b", MESH)
    registry.load_all()
    assert module not in sys.modules


def test_allow_list_counts_for_loaded_backends_too(site, monkeypatch):
    site.good("a")
    registry = site.registry()
    registry.load("a")
    monkeypatch.setenv("MESHCORE_BACKENDS", "numpy")
    with pytest.raises(BackendNotFoundError, match="MESHCORE_BACKENDS"):
        registry.create("a", MESH)


@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_allow_list_allows_all(site, monkeypatch, value):
    site.good("a")
    monkeypatch.setenv("MESHCORE_BACKENDS", value)
    assert "a" in site.registry().describe()


# --- making -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "error", "cause", "match"),
    [
        ("import a_module_that_is_nowhere", BackendLoadError, ModuleNotFoundError, "nowhere"),
        ("raise RuntimeError('no network')", BackendError, RuntimeError, "no network"),
        ("return None", BackendLoadError, type(None), "None"),
    ],
)
def test_a_failing_creation_names_the_backend(site, create, error, cause, match):
    site.bad("it", plugin(create=create))
    with pytest.raises(error, match=match) as caught:
        site.registry().create("it", MESH)
    assert "dist-it 2.5" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize("error", ["MemoryError()", "SpecError('option x')"])
def test_typed_errors_of_a_creation_pass_through(site, error):
    source = plugin(create=f"from meshcore.errors import SpecError; raise {error}")
    site.bad("it", source)
    with pytest.raises((MemoryError, SpecError)) as caught:
        site.registry().create("it", MESH)
    assert type(caught.value).__name__ == error.split("(")[0]


@pytest.mark.parametrize(
    ("probe", "answer"),
    [
        ("None", None),
        ("lambda: None", None),
        ("lambda: 'no device'", "no device"),
        ("lambda: 1 / 0", "its probe failed: ZeroDivisionError: division by zero"),
    ],
)
def test_probe_says_why_a_backend_cannot_run(site, probe, answer):
    module = site.good("it")
    path = site.folder / f"{module}.py"
    path.write_text(path.read_text().replace("PROBE = None", f"PROBE = {probe}"))
    assert site.registry().probe("it") == answer


def test_numpy_values_travel_through_a_backend_made_by_name():
    backend = create_backend("numpy", DeviceMesh([0]))
    from meshcore.spec import BufferSpec, Placement

    spec = BufferSpec(4, "float32", Placement.REPLICATED)
    array = backend.write(backend.zeros(spec), spec, 1, np.float32([5, 6]))
    np.testing.assert_array_equal(backend.to_numpy(array)[0], np.float32([0, 5, 6, 0]))
    backend.close()


# --- metadata that is not as it should be -------------------------------------------------------


@pytest.mark.parametrize("error", [TypeError, KeyError, OSError])
def test_metadata_that_cannot_be_read_is_unknown(error):
    class Unreadable:
        @property
        def metadata(self):
            raise error("no METADATA file")

    assert discovery.field(Unreadable(), "Version") == "unknown"


def test_built_in_backends_need_no_installed_core(site, monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    registry = site.registry()
    assert registry.describe()["numpy"].version == "unknown"
    assert registry.load("numpy").status == "ready"


def test_an_entry_point_without_a_distribution_is_listed_as_unknown():
    entry_point = importlib.metadata.EntryPoint("lone", "meshcore.null", "meshcore.backends")
    found = Registry(lambda: [entry_point]).describe()["lone"]
    assert (found.distribution, found.version) == ("unknown", "unknown")
