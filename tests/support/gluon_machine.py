"""What a warp-specialized program of a Gluon kernel runs on, without a GPU: partitions, barriers, shared memory.

Every partition is a thread, of which one runs at a time; where it would wait, another one goes on. `Machine(order)`
runs them in one of three orders. Whether the program is right must not depend on it: every access to shared memory is
held against what its partition has waited for.

- A partition knows of others what was released to it: arrivals release what came before them in their partition, and
  copies that landed; a wait acquires what the phases of its barrier released (vector clocks).
- Reading needs to know of the last write; writing needs to know of it and of every read. Reads by asynchronous products
  and copies last until they are waited for.
- Tensor cores and copies see what threads have stored, and barriers, only behind `fence_async_shared`.
- A barrier counts arrivals and bytes of a phase; too many are a fault, and too few a deadlock, which is reported.
- When a program ends, nothing may be under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

#: Who goes on: the next partition at every wait; the same one as long as it can; as "greedy", but a partition that has
#: arrived at a barrier goes on when all others wait.
ORDERS: Final = ("round", "greedy", "late")


View = TypeVar("View", bound="Shared")


class Fault(Exception):
    """What would go wrong on a GPU."""


@dataclass
class Clock:
    """What a partition knows: of every partition the last time, and the copies that have landed."""

    times: list[int] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)

    def acquire(self, other: Clock) -> None:
        self.times += [0] * (len(other.times) - len(self.times))
        for i, time in enumerate(other.times):
            self.times[i] = max(self.times[i], time)
        self.copies |= other.copies

    def knows(self, event: tuple[int, int]) -> bool:
        who, time = event
        return len(self.times) > who and self.times[who] >= time


@dataclass
class Cell:
    """A tile in shared memory: who wrote it last, who has read it since, what still reads it."""

    written: tuple[int, int] | None = None
    copy: int | None = None  # written by it
    reads: list[tuple[int, int]] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)  # asynchronous ones
    unfenced: int | None = None  # the partition whose threads stored it


class Barrier:
    """An mbarrier; `phase` counts those that have completed."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine, self.name = machine, name
        self.count = self.arrived = self.bytes = self.phase = 0
        self.fenced = False  # copies know that it is initialized
        self._coming, self._released = Clock(), Clock()

    def init(self, count: int) -> None:
        self.count = count

    def arrive(self, count: int = 1) -> None:
        self.arrived += count
        if self.arrived > self.count:
            raise Fault(f"{self.name}: {self.arrived} arrivals, of {self.count}")
        self._coming.acquire(self._machine.release())
        self._complete()
        if self._machine.order == "late":
            self._machine.give_way()

    def expect(self, number: int) -> None:
        self.bytes += number
        self.arrive()

    def land(self, copy: int, number: int) -> None:
        if not self.fenced:
            raise Fault(f"{self.name}: a copy arrives without a fence_async_shared")
        self.bytes -= number
        if self.bytes < 0:
            raise Fault(f"{self.name}: {-self.bytes} bytes more than it expects")
        self._coming.copies.add(copy)
        self._complete()

    def wait(self, parity: int) -> None:
        if not self.count:
            raise Fault(f"{self.name} is not initialized")
        self._machine.wait_until(lambda: self.phase & 1 != parity & 1, f"{self.name}, parity {parity & 1}")
        self._machine.clock.acquire(self._released)

    def _complete(self) -> None:
        if self.count and self.arrived == self.count and self.bytes == 0:
            self._released.acquire(self._coming)
            self._coming, self.arrived = Clock(), 0
            self.phase += 1


class Shared:
    """A buffer in shared memory, or a view of it; the tiles of its first dimension are cells."""

    def __init__(self, machine: Machine, array: np.ndarray, dtype: Any, name: str, cells: list[Cell]) -> None:
        self.machine, self.array, self.dtype, self.name, self.cells = machine, array, dtype, name, cells  # fmt: skip

    def _view(self: View, array: np.ndarray, cells: list[Cell] | None = None) -> View:
        if not np.shares_memory(array, self.array):
            raise Fault(f"{self.name}: no view has shape {array.shape}")
        return type(self)(self.machine, array, self.dtype, self.name, cells or self.cells)

    def index(self, i: Any) -> Any:
        i = int(i)
        if not 0 <= i < len(self.array):
            raise Fault(f"{self.name}: tile {i} of {len(self.array)}")
        whole = len(self.cells) == len(self.array)
        return self._view(self.array[i], [self.cells[i]] if whole else None)

    def reshape(self: View, shape: Any) -> View:
        return self._view(self.array.reshape(shape))

    def permute(self: View, order: Any) -> View:
        return self._view(self.array.transpose(order))

    def slice(self: View, start: int, length: int, dim: int = 0) -> View:
        return self._view(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    # ------------------------------------------------------------------ accesses
    def read(self, asynchronous: str = "") -> None:
        """Note that it is read, until `read_ends` if `asynchronous` says by what."""
        for cell in self.cells:
            self._know_of_write(cell, "read")
            if asynchronous:
                if cell.unfenced is not None:
                    raise Fault(f"{self.name}: {asynchronous} reads it without a fence_async_shared")
                cell.readers.append(asynchronous)
            else:
                cell.reads.append(self.machine.now())

    def read_ends(self, asynchronous: str) -> None:
        for cell in self.cells:
            cell.readers.remove(asynchronous)
            cell.reads.append(self.machine.now())

    def write(self, values: np.ndarray, copy: int | None = None) -> None:
        """Store `values`; `copy` is the number of an asynchronous copy."""
        if values.shape != self.array.shape:
            raise Fault(f"{self.name}: a tile {values.shape} does not fit {self.array.shape}")
        for cell in self.cells:
            self._know_of_write(cell, "overwritten")
            if cell.readers:
                raise Fault(f"{self.name}: overwritten while {cell.readers[0]} reads it")
            if not all(self.machine.knows(read) for read in cell.reads):
                raise Fault(f"{self.name}: overwritten by a partition that has not waited for its readers")
            cell.reads.clear()
            cell.copy = copy
            cell.written = self.machine.now() if copy is None else None
            cell.unfenced = self.machine.me if copy is None else None
        self.array[...] = values

    def _know_of_write(self, cell: Cell, what: str) -> None:
        if cell.copy is not None and cell.copy not in self.machine.clock.copies:
            raise Fault(f"{self.name}: {what} before its copy was waited for")
        if cell.written is not None and not self.machine.knows(cell.written):
            raise Fault(f"{self.name}: {what} by a partition that has not waited for what another stored")


@dataclass
class Added:
    """What programs have added to tiles in global memory, and what each value of a counter makes known of it."""

    to: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    released: dict[int, list[set[int]]] = field(default_factory=dict)
    count: int = 0


class Own(threading.local):
    """What the partition that runs has; every thread has its own."""

    def __init__(self) -> None:
        self.number = 0
        self.queue: list[Any] = []  # products under way
        self.stores: list[Any] = []  # tiles on their way to global memory
        self.adding: list[int] = []  # additions under way
        self.known: set[int] = set()  # additions that are in memory before what it does next
        #: The counter that it has asked for, and what it got.
        self.asked: tuple[int, int | None] | None = None


class Machine:
    """One program: its partitions, of which one runs at a time, and its shared memory."""

    def __init__(self, order: str, added: Added | None = None) -> None:
        self.order = order
        self.added = added or Added()
        self.barriers: list[Barrier] = []
        self.cells: list[Cell] = []
        self.copies = 0
        self._clocks: list[Clock] = [Clock([1])]  # of the program itself, then of its partitions
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._giving: set[int] = set()
        self._running: list[int] = []
        self._turns: dict[int, threading.Semaphore] = {}
        self._error: BaseException | None = None
        self.own = Own()

    # ------------------------------------------------------------------ who runs, and what it knows
    @property
    def me(self) -> int:
        return self.own.number

    @property
    def clock(self) -> Clock:
        return self._clocks[self.me]

    def now(self) -> tuple[int, int]:
        return self.me, self.clock.times[self.me]

    def knows(self, event: tuple[int, int]) -> bool:
        return event[0] == self.me or self.clock.knows(event)

    def release(self) -> Clock:
        """What the partition that runs knows now; what it does from here on is later."""
        known = Clock(list(self.clock.times), set(self.clock.copies))
        self.clock.times[self.me] += 1
        return known

    # ------------------------------------------------------------------ additions, and their order
    def adds(self, at: tuple[int, ...]) -> None:
        """A copy stores or adds to the tile `at`, a tensor and a place in it: whoever did before must be done."""
        before = self.added.to.setdefault(at, [])
        if not self.own.known.issuperset(before):
            raise Fault(f"a tile at {at[1:]} is added to before what others add is known to be there")
        self.added.count += 1
        before.append(self.added.count)
        self.own.adding.append(self.added.count)

    def stored(self) -> None:
        """What was added is in memory."""
        self.own.known.update(self.own.adding)
        self.own.adding.clear()

    def count(self, counter: int, found: int, more: int, sem: str) -> int:
        """Of a counter that is `found`, and `more` is added to: what the program gets.

        Who asks (0 more) gets the value before at first, as if programs before were late; then the value. Nobody else
        runs, so that who asks again would do so forever.
        """
        known = self.added.released.setdefault(counter, [set()])
        if more:
            known.append(known[found] | (self.own.known if sem == "release" else set()))
            self.own.asked = None
            return found
        asked = self.own.asked
        if asked == (counter, found):
            raise Fault(f"a deadlock: counter {counter} stays {found}")
        first = asked != (counter, None)
        self.own.asked = (counter, None if first else found)
        seen = max(found - 1, 0) if first else found
        if sem == "acquire":
            self.own.known.update(known[seen])
        return seen

    # ------------------------------------------------------------------ turns
    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Give the turn away until `ready()`."""
        if self.order == "round":
            self._pass_on()
        while not ready():
            self._waiting[self.me] = ready, what
            if not (self._giving or any(map(self._can_go_on, self._running))):
                waits = "; ".join(f"partition {n} for {w[1]}" for n, w in sorted(self._waiting.items()))
                raise Fault(f"a deadlock: {waits}")
            self._pass_on()
        self._waiting.pop(self.me, None)

    def give_way(self) -> None:
        """Until no other partition can go on."""
        self._giving.add(self.me)
        while any(map(self._can_go_on, self._running)):
            self._pass_on()
        self._giving.remove(self.me)

    def _can_go_on(self, number: int) -> bool:
        waits = self._waiting.get(number)
        return number not in self._giving and (waits is None or waits[0]())

    def _pass_on(self) -> None:
        """Let the next partition run that can go on, or has given way; come back when it is this one's turn."""
        if not (me := self.me):
            return
        ring = [n for n in self._running if n > me] + [n for n in self._running if n < me]
        able = [n for n in ring if self._can_go_on(n)] or [n for n in ring if n in self._giving]
        if able:
            self._turns[able[0]].release()
            self._turns[me].acquire()
            if self._error is not None:
                raise self._error

    def specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run the partitions to their end."""
        start = self.release()
        count = 1 + len(parts)
        for number in range(1, count):
            clock = Clock([0] * count)
            clock.acquire(start)
            clock.times[number] = 1
            self._clocks.append(clock)
        self._running = list(range(1, count))
        self._turns = {number: threading.Semaphore(0) for number in self._running}

        def run(number: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            self.own.number = number
            self._turns[number].acquire()
            try:
                with np.errstate(all="ignore"):
                    if self._error is None:
                        function(*arguments)
                        if self.own.queue or self.own.stores:
                            raise Fault(f"partition {number} ends while a product or a copy is under way")
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._running.remove(number)
                self._waiting.pop(number, None)
                self._giving.discard(number)
                ready = [n for n in self._running if self._error or self._can_go_on(n)]
                for following in (ready or self._running)[:1]:
                    self._turns[following].release()

        threads = [threading.Thread(target=run, args=(1 + n, *part), daemon=True) for n, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        self._turns[1].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        for clock in self._clocks[1:]:
            self.clock.acquire(clock)

    def end(self) -> None:
        """Hold the program to what must be so at its end."""
        for barrier in self.barriers:
            if barrier.bytes or barrier.arrived:
                raise Fault(f"{barrier.name} is in the middle of a phase when the program ends")
        if len(self.clock.copies) < self.copies:
            raise Fault("the program ends while a copy that nobody waited for is under way")
