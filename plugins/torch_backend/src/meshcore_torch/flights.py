"""What is in flight: collectives that were started and not waited for.

[Note: streams] On CUDA everything that a move does runs on one side stream of the backend. It first
waits for the stream that is current when the move starts (which wrote the source), and leaves an
event behind. ``complete`` makes the stream that is current then wait for this event, without
stopping the host. So buffers need no ``record_stream``: they are alive until ``wait``, and whatever
reuses their memory afterwards is ordered behind the event. Where an end of the move is host memory,
which the host reads and writes without asking any stream, ``complete`` stops the host instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from meshcore_torch.collectives import Works
from meshcore_torch.groups import Group
from meshcore_torch.moves import Move


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """One move on its way.

    Attributes:
        move: keeps its tensors alive, and with them their identity.
        group: what it is over, if not local.
        works: what to wait for.
        finish: the local rest of the move, after all works.
    """

    move: Move
    group: Group | None
    works: Works
    finish: Callable[[], None] | None

    @property
    def target(self) -> torch.Tensor:
        """Where the result lands."""
        return self.move.target

    def complete(self) -> None:
        """Wait, then finish.

        Raises:
            PeerError: a peer is gone or late.
        """
        if self.group is not None:
            with self.group.blame(self.move):
                for work in self.works:
                    work.wait()
        if self.finish is not None:
            self.finish()


@dataclass(frozen=True, eq=False, slots=True)
class StreamFlight:
    """A move whose parts are all queued on the side stream. See [Note: streams]."""

    target: torch.Tensor
    event: torch.cuda.Event
    device: torch.device
    host: bool

    def complete(self) -> None:
        """Order what comes next behind the move."""
        if self.host:
            self.event.synchronize()
        else:
            torch.cuda.current_stream(self.device).wait_event(self.event)


class SideStream:
    """The stream that moves of one backend run on. See [Note: streams]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the same

    @contextmanager
    def issue(self) -> Iterator[None]:
        """Queue what is in the scope behind the current stream; on failure the other way round."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            # What was queued still uses the buffers, and the caller is about to free them.
            current.wait_stream(self._stream)
            raise

    def launched(self, target: torch.Tensor, *, host: bool) -> StreamFlight:
        """The flight of everything that was queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record(self._stream)
        return StreamFlight(target, event, self.device, host)
