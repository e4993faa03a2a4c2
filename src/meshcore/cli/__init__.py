"""The ``meshcore`` command; needs the extra ``cli`` and says so where it is missing.

``meshcore backends`` and ``meshcore doctor``, both with ``--json``, and ``meshcore --version``. The
JSON is described in ``meshcore.cli._report``.
"""

from __future__ import annotations

import sys

_EXTRA = ("rich", "typer")


def main() -> None:
    """Run the command line and exit: 0, 1 where ``doctor`` found an error, 2 for wrong usage."""
    try:
        from meshcore.cli._app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"the meshcore command needs {error.name}, which is not installed; "
            "`pip install 'meshcore-train[cli]'` adds it\n"
        )
        raise SystemExit(2) from error
    app(prog_name="meshcore")
