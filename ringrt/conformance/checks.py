"""What a check is, and what can come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ringrt.plugins import one_line

Subject = TypeVar("Subject")
Thing = TypeVar("Thing")

#: What came of a check. Refused: the subject said in words why it does not do this.
State = Literal["passed", "refused", "failed"]


class Failed(AssertionError):
    """One line: what was expected, what came, and for which problem."""


class Refused(Exception):
    """The words by which the subject says that it does not do what a check is about."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check, and one line about it: the failure, or the words of a refusal (of
    the whole check, or of some of its problems where the others passed)."""

    check: str
    state: State
    detail: str = ""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """A named function with one purpose. It raises `Failed`, or `Refused`, or returns."""

    name: str
    summary: str
    body: Callable[[Subject], None]

    def run(self, subject: Subject) -> Outcome:
        """Call it."""
        return attempt(self.name, lambda: self.body(subject))


class CheckList(Generic[Subject]):
    """Checks in the order in which they are written. `add` is a decorator: a check has the name
    of its function, with hyphens, and the first line of its docstring as its summary."""

    def __init__(self) -> None:
        self._checks: list[Check[Subject]] = []

    def __iter__(self) -> Iterator[Check[Subject]]:
        return iter(self._checks)

    def add(self, body: Callable[[Subject], None]) -> Callable[[Subject], None]:
        """Take in a check."""
        summary = (body.__doc__ or "").strip().split("\n\n")[0]
        name = body.__name__.replace("_", "-")
        self._checks.append(Check(name, " ".join(summary.split()), body))
        return body


def attempt(name: str, body: Callable[[], None]) -> Outcome:
    """What comes of a call. Whatever else it raises is a failure too."""
    try:
        body()
    except Refused as refusal:
        return Outcome(name, "refused", str(refusal))
    except Failed as failure:
        return Outcome(name, "failed", str(failure), failure)
    except (Exception, SystemExit) as error:
        return Outcome(name, "failed", one_line(error), error)
    return Outcome(name, "passed")


def expect(truth: object, text: str) -> None:
    """`Failed` with that text unless something is true."""
    if not truth:
        raise Failed(text)


def each(things: Iterable[Thing], of: Callable[[Thing], object]) -> list[str]:
    """Call a function for several problems. Returns the words of those that were refused;
    `Refused` if all were."""
    refusals: list[str] = []
    done = 0
    for thing in things:
        try:
            of(thing)
        except Refused as refusal:
            refusals.append(str(refusal))
        else:
            done += 1
    words = list(dict.fromkeys(refusals))
    if words and not done:
        raise Refused("; ".join(words))
    return words
