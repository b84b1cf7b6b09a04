"""The processes of one run: who this one is, and what they decide together."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onegraph.distributed import average_gradients
from onegraph.errors import OnegraphError
from onegraph.training.randomness import random_states, restore_random_states, seed_everything
from onegraph.training.state import SavedState
from onegraph.training.streams import stream_seed

CPU = torch.device("cpu")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its run; every process makes the same calls in the same order.

    Args:
        rank: This one's number, from 0.
        count: Of processes.
        device: Where messages are made.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def stream(self) -> IO[str] | None:
        """Where progress goes: nowhere but in the first process; None for where it always goes."""
        return None if self.first else io.StringIO()

    def fingerprint(self, saved: SavedState[Any] | None) -> dict[str, str]:
        """What a state says about the processes, so that another number of them is found out; nothing for one alone."""
        name = "number of processes"
        return {name: str(self.count)} if self.several or (saved is not None and name in saved.fingerprints) else {}

    def part(self, values: Sequence[T]) -> Sequence[T]:
        """This process's equal part of what all of them have."""
        size = len(values) // self.count
        return values[self.rank * size : (self.rank + 1) * size]

    def part_of_rows(self, value: Tensor) -> Tensor:
        """This process's equal part of the rows of a tensor."""
        size = value.shape[0] // self.count
        return value[self.rank * size : (self.rank + 1) * size]

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every process gets the mean of all gradients."""
        if self.several:
            average_gradients(parameters)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes, element by element."""
        if not self.several:
            return values
        total = values.detach().clone()
        dist.all_reduce(total)
        return total / self.count

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        if not self.several:
            return flag
        found = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def of_first(self, value: T) -> T:
        """What the first process has."""
        if not self.several:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all(self, value: T) -> list[T]:
        """What each process has, by rank."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def first_does(self, call: Callable[[], T]) -> T | None:
        """Lets the first process do something that only one may, such as writing a file; the others wait, and fail when it fails.

        Returns:
            What ``call`` returned, None in the others.
        """
        if not self.several:
            return call()
        result: T | None = None
        error: BaseException | None = None
        if self.first:
            try:
                result = call()
            except BaseException as caught:
                error = caught
        told = self.of_first(None if error is None else _told(error, self.rank))
        if error is not None:
            raise error
        if told is not None:
            raise _retold(told)
        return result

    def say(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """What prints a line for the user: one process does."""
        return say if self.first else _say_nothing

    @contextlib.contextmanager
    def first_holds(self, context: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
        """Inside, the first process is in a context that only one may be in; when it can't enter it, all fail."""
        with contextlib.ExitStack() as stack:
            with self.together():
                if self.first:
                    stack.enter_context(context())
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, each process works by itself; when one fails, all of them do, none waits for ever. No messages are sent inside."""
        if not self.several:
            yield
            return
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        failures = [told for told in self.all(None if error is None else _told(error, self.rank)) if told is not None]
        if error is not None:
            raise error
        if failures:
            raise _retold(failures[0])


class OwnRandomness:
    """The random generators of every process, as a part of a state: each gets its own back.

    Args:
        ranks: The processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: dict[str, Any] | None = None
        self._everyone: dict[str, Any] = {}

    def collect(self) -> None:
        """Reads the generators of all processes, for the state that the first one is about to write; every process calls it."""
        self._everyone = {str(rank): states for rank, states in enumerate(self._ranks.all(random_states()))}

    def state_dict(self) -> dict[str, Any]:
        """What was collected, by rank."""
        return self._everyone

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until ``put_back``: the first process's generators are restored in between."""
        self._own = state_dict[str(self._ranks.rank)]

    def put_back(self) -> None:
        """Sets this process's generators to what was loaded."""
        if self._own is not None:
            restore_random_states(self._own)


def own_randomness(ranks: Ranks, seed: int) -> OwnRandomness | None:
    """From here on every process draws its own: the masks of dropouts differ as those of other rows do. None for one process alone."""
    if not ranks.several:
        return None
    seed_everything(stream_seed(seed, "process", ranks.rank))
    return OwnRandomness(ranks)


def _say_nothing(_: str) -> None:
    pass


_Told = tuple[type[OnegraphError], str, str, str, str]


def _told(error: BaseException, rank: int) -> _Told:
    """An error as it is sent to the other processes."""
    if not isinstance(error, OnegraphError):
        error = OnegraphError(f"process {rank} failed: {error!r}", why="Its own output says more.", code="other-process-failed")
    return type(error), error.what, error.why, error.hint, error.code


def _retold(told: _Told) -> OnegraphError:
    kind, what, why, hint, code = told
    return kind(what, why=why, hint=hint, code=code)
