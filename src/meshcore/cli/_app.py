"""Commands and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshcore.backend import BACKEND_API
from meshcore.cli import _report
from meshcore.registry import BackendDescription
from meshcore.registry.discovery import CORE_DISTRIBUTION
from meshcore.registry.loading import version_text

_WIDTH = 100
_STYLES = {
    "ready": "green",
    "ok": "green",
    "unavailable": "yellow",
    "excluded": "dim",
    "warning": "yellow",
    "broken": "red",
    "rejected": "red",
    "error": "red",
}

app = typer.Typer(
    name="meshcore",
    help="Chunked, sharded training memory: what is installed, and whether it works.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")]
_Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that one backend may take to load.")
]


def _show_version(asked: bool) -> None:
    if asked:
        version = _report.installed_version(CORE_DISTRIBUTION) or "(not installed)"
        _write(f"{CORE_DISTRIBUTION} {version}, backend API {version_text(BACKEND_API)}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Chunked, sharded training memory: what is installed, and whether it works."""


@app.command()
def backends(as_json: _Json = False, timeout: _Timeout = 120.0) -> None:
    """List the installed backends: version, and whether each is ready or why not.

    Each one is loaded in a process of its own.
    """
    found = _report.examined_backends(timeout_seconds=timeout)
    if as_json:
        _write_json({"backends": [_report.backend_json(backend) for backend in found]})
        return
    console = _console()
    console.print(_backend_table(console, found))


@app.command()
def doctor(as_json: _Json = False, timeout: _Timeout = 120.0) -> None:
    """Check this installation and say what to do; exits with 1 where something is broken."""
    diagnosis = _report.diagnose(timeout_seconds=timeout)
    if as_json:
        _write_json(diagnosis.to_json())
    else:
        _show(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _show(diagnosis: _report.Diagnosis) -> None:
    console = _console()
    packages = _table(console, "package", "version")
    python = diagnosis.to_json()["python"]
    for name, version in {"python": python, **diagnosis.packages}.items():
        packages.add_row(name, version or Text("not installed", style="dim"))
    checks = _table(console, "check", "status", "finding")
    for check in diagnosis.checks:
        checks.add_row(check.name, _status(check.status), Text(check.message))
    for part in (packages, _backend_table(console, diagnosis.backends), checks):
        console.print(part)
        console.print()
    for check in diagnosis.checks:
        if check.action:
            console.print(Text(f"{check.name}: {check.action}"))
    worst = "nothing is broken" if diagnosis.ok else "something is broken, see above"
    console.print(Text(worst, style="green" if diagnosis.ok else "red"))


def _backend_table(console: Console, found: Iterable[BackendDescription]) -> Table:
    table = _table(console, "backend", "distribution", "version", "api", "status", "about")
    for backend in found:
        table.add_row(
            backend.name,
            backend.distribution,
            backend.version,
            "" if backend.api is None else version_text(backend.api),
            _status(backend.status),
            Text(backend.reason or backend.summary),
        )
    return table


def _table(console: Console, *columns: str) -> Table:
    """A table whose last column takes the rest of the width; no lines where nobody looks."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in columns[:-1]:
        table.add_column(column, overflow="fold")
    table.add_column(columns[-1], overflow="fold", ratio=1)
    return table


def _status(status: str) -> Text:
    return Text(status, style=_STYLES[status])


def _console() -> Console:
    console = Console()
    # A pipe has no width: take all of ours, so that what reads it gets the same lines everywhere.
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    return console


def _write_json(value: dict[str, Any] | Sequence[Any]) -> None:
    _write(json.dumps(value, indent=2) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
