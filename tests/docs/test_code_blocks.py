"""Every python block of the documentation runs.

Blocks of one page run in order in one namespace, as a reader would type them. A block marked
``python torch ranks=N`` runs in N processes of a gloo group, and one marked ``python jax`` in a
process of its own. Blocks of other languages, ``sh`` and ``py`` among them, are not run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/README.md")])
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.M | re.S)
SECONDS = 120  # a guard against hangs


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, how it wants to run, and its code."""

    page: Path
    line: int
    words: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, m.start(2)) + 1, tuple(m[1].split()), m[2])
        for m in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PLAIN_PAGES = sorted({block.page for block in BLOCKS if not block.words})
OWN_PROCESS = [block for block in BLOCKS if block.words]


def test_there_are_blocks_of_every_kind():
    assert len(PLAIN_PAGES) >= 4
    assert {block.words[0] for block in OWN_PROCESS} == {"torch", "jax"}


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_plain_blocks(page):
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for block in blocks_of(page):
        if not block.words:
            # Newlines in front make the line numbers of a traceback those of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), namespace)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environments(block: Block) -> list[dict[str, str]]:
    """The environment of each process that a block wants."""
    clean = {k: v for k, v in os.environ.items() if k not in {"XLA_FLAGS", "NPROC"}}
    options = dict(word.split("=") for word in block.words[1:])
    ranks, port = int(options.get("ranks", 1)), str(free_port())
    return [
        clean
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("block", OWN_PROCESS, ids=str)
def test_blocks_in_processes_of_their_own(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text("\n" * (block.line - 1) + block.code)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::FutureWarning", str(script)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in environments(block)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
