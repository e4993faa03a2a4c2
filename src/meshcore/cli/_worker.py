"""Load and probe one backend, in a process that has nothing else to do and may die of it.

Run as ``python -m meshcore.cli._worker NAME``; writes one JSON object to its standard output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from meshcore.errors import MeshcoreError
from meshcore.registry import default_registry


def examine(name: str) -> dict[str, Any]:
    """Status, reason, API version and summary of a backend after it was loaded and probed."""
    registry = default_registry()
    try:
        description = registry.load(name)
        reason = registry.probe(name)
    except MeshcoreError as error:
        known = registry.describe().get(name)
        status, text = (known.status, known.reason) if known is not None else ("broken", "")
        return {"status": status, "reason": text or str(error), "api": None, "summary": ""}
    return {
        "status": "ready" if reason is None else "unavailable",
        "reason": reason or "",
        "api": description.api,
        "summary": description.summary,
    }


def main() -> None:
    """Examine the backend named on the command line."""
    # What a plugin prints, from native code too, must not end up in the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    result = examine(sys.argv[1])
    with os.fdopen(answer, "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()
