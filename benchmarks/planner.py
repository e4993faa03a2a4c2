"""Time of the planner and waste of its plans, on the tensor shapes of real models.

    python benchmarks/planner.py                 # a table
    python benchmarks/planner.py --json          # the same as JSON, with versions and machine

Nothing is allocated: a plan is made of names and ints. Each figure is the median over ``--repeat``
plans. Waste is slot gaps and padding over all shards, in bytes and in percent of the tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import meshcore as mc

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Gpt2:
    """GPT-2: learned positions, biases everywhere, an output head tied to the embedding."""

    layers: int
    width: int
    vocab: int = 50257
    context: int = 1024

    def shapes(self) -> Shapes:
        """Name and shape of each tensor, in the order of the forward pass."""
        d = self.width
        yield "wte", (self.vocab, d)
        yield "wpe", (self.context, d)
        for i in range(self.layers):
            yield from _with_bias(f"h.{i}.ln_1", (d,))
            yield from _with_bias(f"h.{i}.attn.c_attn", (d, 3 * d))
            yield from _with_bias(f"h.{i}.attn.c_proj", (d, d))
            yield from _with_bias(f"h.{i}.ln_2", (d,))
            yield from _with_bias(f"h.{i}.mlp.c_fc", (d, 4 * d))
            yield from _with_bias(f"h.{i}.mlp.c_proj", (4 * d, d))
        yield from _with_bias("ln_f", (d,))


@dataclass(frozen=True)
class Llama:
    """Llama and its kind: grouped keys and values, gated feed-forward, or experts in its place."""

    layers: int
    width: int
    inner: int
    vocab: int
    queries: int
    keys: int
    experts: int = 0

    def shapes(self) -> Shapes:
        """Name and shape of each tensor, in the order of the forward pass."""
        d = self.width
        yield "embed_tokens", (self.vocab, d)
        for i in range(self.layers):
            layer = f"layers.{i}"
            yield f"{layer}.input_norm", (d,)
            yield f"{layer}.q_proj", (self.queries, d)
            yield f"{layer}.k_proj", (self.keys, d)
            yield f"{layer}.v_proj", (self.keys, d)
            yield f"{layer}.o_proj", (d, self.queries)
            yield f"{layer}.post_norm", (d,)
            if self.experts:
                yield f"{layer}.router", (self.experts, d)
            for expert in range(self.experts or 1):
                yield f"{layer}.{expert}.gate_proj", (self.inner, d)
                yield f"{layer}.{expert}.up_proj", (self.inner, d)
                yield f"{layer}.{expert}.down_proj", (d, self.inner)
        yield "norm", (d,)
        yield "lm_head", (self.vocab, d)


MODELS: dict[str, Gpt2 | Llama] = {
    "GPT2-124M": Gpt2(layers=12, width=768),
    "Llama2-7B": Llama(32, 4096, inner=11008, vocab=32000, queries=4096, keys=4096),
    "Llama3-8B": Llama(32, 4096, inner=14336, vocab=128256, queries=4096, keys=1024),
    "MoE-30B-128e": Llama(48, 2048, inner=768, vocab=151936, queries=4096, keys=512, experts=128),
}


@dataclass(frozen=True)
class Row:
    """One model in one mode; seconds are the median of the repeats, bytes are of all shards."""

    model: str
    mode: str
    tensors: int
    params: int
    chunks: int
    largest_chunk_numel: int
    waste_nbytes: int
    waste_percent: float
    seconds: float


def _with_bias(name: str, shape: tuple[int, ...]) -> Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def modes(specs: list[mc.ParamSpec], shards: int) -> dict[str, Callable[[], mc.ChunkPlan]]:
    """What is timed. The second search may not put two of the largest tensors into one chunk."""
    largest = max(spec.numel for spec in specs)
    return {
        "variable": lambda: mc.plan_chunks(specs, shards=shards),
        "uniform": lambda: mc.plan_chunks(specs, shards=shards, mode="uniform"),
        "uniform, no larger than a tensor": lambda: mc.plan_chunks(
            specs, shards=shards, mode="uniform", max_capacity_numel=largest
        ),
    }


def measure(model: str, shards: int, repeat: int) -> list[Row]:
    """All modes on one model."""
    specs = [mc.ParamSpec(name, shape, "bfloat16") for name, shape in MODELS[model].shapes()]
    rows = []
    for mode, plan_it in modes(specs, shards).items():
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            plan = plan_it()
            seconds.append(time.perf_counter() - start)
        rows.append(
            Row(
                model=model,
                mode=mode,
                tensors=len(specs),
                params=sum(spec.numel for spec in specs),
                chunks=len(plan.chunks),
                largest_chunk_numel=max(chunk.numel for chunk in plan.chunks),
                waste_nbytes=plan.waste_nbytes,
                waste_percent=100 * plan.waste_nbytes / plan.param_nbytes,
                seconds=statistics.median(seconds),
            )
        )
    return rows


def show(rows: list[Row], shards: int) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Planner, bfloat16, {shards} shards, slots at 64 bytes")
    table.add_column("model")
    table.add_column("mode")
    for title in ("tensors", "chunks", "largest chunk", "waste bytes", "waste %", "seconds"):
        table.add_column(title, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.model != row.model:
            table.add_section()
        table.add_row(
            row.model,
            row.mode,
            f"{row.tensors:,}",
            f"{row.chunks:,}",
            f"{row.largest_chunk_numel:,}",
            f"{row.waste_nbytes:,}",
            f"{row.waste_percent:.4f}",
            f"{row.seconds:.3f}",
        )
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--shards", type=int, default=8, help="ranks of the shard axis (8)")
    parser.add_argument("--repeat", type=int, default=3, help="plans per figure (3)")
    parser.add_argument("--model", choices=MODELS, action="append", help="one of several; all")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error("--repeat is 1 or more")
    rows = [
        row
        for model in arguments.model or MODELS
        for row in measure(model, arguments.shards, arguments.repeat)
    ]
    if arguments.json:
        about = {
            "meshcore": mc.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "shards": arguments.shards,
            "repeat": arguments.repeat,
        }
        print(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        show(rows, arguments.shards)


if __name__ == "__main__":
    main()
