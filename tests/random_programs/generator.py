"""Makes a program from a seed: the same one on all ranks and in all runs.

A program is correct by construction. A wrong step is wrong on purpose, and must be refused before
anything starts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from account import ARRAYS, ARRAYS_BYTES, DTYPES, FLOATS, SUMS, WRONG, Account, Object
from program import PER_WORLD, Program, Step, World

# The features that a program may have; ``--only`` chooses some. README.md explains them.
FEATURES = (
    "allreduce", "handles", "exchanges", "groups", "segments", "onesided", "wrong", "refusals",
    "timeouts", "creation", "hold", "hooks", "threads", "look", "giveup", "drop", "leave",
    "ownplan", "often", "wrap",
)  # fmt: skip
GENERATIONS = 4095  # after so many executions generations repeat
_KINDS = (
    "sum", "sum", "sum", "sum", "average", "average", "reduce", "broadcast", "reduce-scatter",
    "all-gather", "all-to-all",
)  # fmt: skip


def world_of(number: int) -> World:
    """Worlds differ in size and adversary."""
    dice = random.Random(f"world {number}")
    adversary: dict[str, Any] = {"seed": number, "delay": dice.choice((0, 0, 1, 3, 5))}
    for name, often in (("reorder", 0.4), ("late_source", 0.4)):
        if dice.random() < often:
            adversary[name] = True
    if dice.random() < 0.4:
        adversary["refuse"] = dice.choice((1, 2))
    if dice.random() < 0.2:
        adversary["mapped"] = False
    if dice.random() < 0.2:
        adversary["progress"] = "thread"
    return World(number, dice.choice((2, 2, 2, 3, 3, 4)), adversary)


def program_of(
    seed: int, features: Iterable[str] = FEATURES, *, mapped: bool = True, size: int = 0
) -> Program:
    """The program of a seed, made of these features.

    Parameters
    ----------
    mapped : the way can map memory
    size : number of ranks; 0: the world's
    """
    maker = _maker(seed, features, mapped, size)
    return Program(seed, maker.world, tuple(maker.steps()))


def after_loss(seed: int, gone: int, *, mapped: bool, size: int) -> Program:
    """The steps of the others after the loss of rank ``gone``."""
    maker = _maker(seed, FEATURES, mapped, size)
    return Program(seed, maker.world, tuple(maker.go_on(gone)))


def _maker(seed: int, features: Iterable[str], mapped: bool, size: int) -> _Maker:
    world = world_of(seed // PER_WORLD)
    return _Maker(seed, replace(world, size=size or world.size), set(features), mapped)


class _Maker(Account):
    """Makes one program."""

    def steps(self) -> list[Step]:
        """All steps; at the end nothing is under way."""
        makers: tuple[tuple[str, int, Callable[[], list[Step]]], ...] = (
            ("groups", 1, self._group),
            ("groups", 1, self._barrier),
            ("groups", 2, self._reduce),
            ("segments", 2, self._segment),
            ("onesided", 2, self._onesided),
            ("allreduce", 7, self._allreduce),
            ("often", 1, self._often),
            ("handles", 4, self._handle),
            ("handles", 8, self._run_handle),
            ("exchanges", 3, self._exchange),
            ("exchanges", 6, self._iterate),
            ("wrong", 6, self._wrong),
            ("threads", 2, self._threads),
            ("look", 1, self._look),
            ("giveup", 2, self._give_up),
            ("hooks", 1, self._hook_raises),
            ("drop", 3, self._drop),
            ("hold", 3, self.complete),
        )
        wanted = [(often, maker) for name, often, maker in makers if name in self.features]
        weights = [often for often, _ in wanted]
        steps: list[Step] = []
        for _ in range(self.dice.randint(4, 14)):
            maker = self.dice.choices([maker for _, maker in wanted], weights)[0]
            steps += maker()
        if self.leaves:
            return steps + self._leave()
        return steps + self.complete()

    # --- groups, segments, one-sided

    def _group(self) -> list[Step]:
        if len(self.groups) > 4:
            return []
        size = self.world.size
        ranks = tuple(sorted(self.dice.sample(range(size), self.dice.randint(1, size))))
        name = self.name("g")
        self.groups[name] = ranks
        return [Step("group", {"ranks": ranks, **self.attempts()}, name)]

    def _barrier(self) -> list[Step]:
        group = self.some_group()
        before = self.free(f"barrier {group}")
        held = self.hold({f"barrier {group}"}, True)
        given = {"group": group, "held": held, **self.attempts()}
        return [*before, Step("barrier", given, uses=(group,))]

    def _reduce(self) -> list[Step]:
        group = self.some_group()
        before = self.free(f"reduce {group}")
        held = self.hold({f"reduce {group}"}, True)
        given = {
            "group": group, "count": self.dice.choice((0, 1, 100, 3000)), "key": self.key(),
            "dtype": self.dice.choice(DTYPES), "held": held, **self.attempts(),
        }  # fmt: skip
        return [*before, Step("reduce", given, uses=(group,))]

    def _segment(self) -> list[Step]:
        if len(self.segments) > 5:
            return []
        group, name = self.some_group(), self.name("s")
        before = self.free(f"gather {group}")
        self.segments[name] = Object(group)
        given = {"group": group, "nbytes": ARRAYS + ARRAYS_BYTES, **self.attempts()}
        return [*before, Step("segment", given, name, (group,))]

    def _onesided(self) -> list[Step]:
        if self.chance(0.3):
            given = {"shift": self.dice.randrange(self.world.size), "key": self.key()}
            return [Step("passive", {**given, "lag": self.attempts()["lag"]})]
        if not self.segments:
            return []
        name = self.dice.choice(list(self.segments))
        group = self.segments[name].group
        what = self.dice.choice(("put", "put", "count", "get", "atomics"))
        before = self.free(f"barrier {group}")
        given = {"segment": name, "group": group, "key": self.key(),
                 "shift": self.dice.randrange(len(self.groups[group])),
                 "nbytes": self.dice.choice((0, 1, 8, 1000, 4096)),
                 "lag": self.attempts()["lag"]}  # fmt: skip
        return [*before, Step(what, given, uses=(name, group))]

    # --- collectives with arrays

    def _place(self, group: str, nbytes: int) -> tuple[str, int]:
        """Maybe a place in a segment of the group, where arrays do not overlap."""
        mine = [name for name, each in self.segments.items() if each.group == group]
        if not mine or nbytes > ARRAYS_BYTES or self.chance(0.5):
            return "", 0
        name = self.dice.choice(mine)
        at = self.segments[name].count  # bytes in use
        if at + nbytes > ARRAYS_BYTES:
            return "", 0
        self.segments[name].count += -(-nbytes // 64) * 64
        return name, ARRAYS + at

    def _array(self, group: str) -> tuple[list[Step], str]:
        mine = [name for name, each in self.arrays.items() if each.group == group]
        if mine and self.chance(0.6):
            return [], self.dice.choice(mine)
        name, dtype = self.name("a"), self.dice.choice(DTYPES)
        count = self.count(group, "sum")
        segment, at = self._place(group, count * 8)
        self.arrays[name] = Object(group, dtype, count, segment=segment)
        given = {"group": group, "dtype": dtype, "count": count, "segment": segment, "at": at}
        return [Step("array", given, name, (group, segment) if segment else (group,))], name

    def _allreduce(self) -> list[Step]:
        group = self.some_group()
        steps = self.free(f"allreduce {group}", f"gather {group}")
        more, name = self._array(group)
        array = self.arrays[name]
        op = "sum" if array.dtype.startswith("int") else self.dice.choice(("sum", "mean"))
        kept = {f"allreduce {group}", name}
        warm = group in self.warm
        self.warm.add(group)
        feature = "timeouts" if warm else "creation"
        # A long allreduce runs in parts: between two of them the other ranks wait until this rank
        # calls again. The first of a group makes its workspace: no other collective may overtake.
        held = self.hold(kept, False) if warm and array.count <= 5000 else ""
        given = {
            "group": group, "array": name, "op": op, "key": self.key(), "held": held,
            "plan": self.plan("allreduce", bool(array.segment)),
            **self.attempts(feature=feature),
            "other": [self.chance(0.1, "refusals") for _ in range(self.world.size)],
        }  # fmt: skip
        return [*steps, *more, Step("allreduce", given, uses=(group, name))]

    def _often(self) -> list[Step]:
        """One call many times; rarely so many that generations repeat for an array used once."""
        group = self.some_group()
        steps = self.free(f"allreduce {group}", f"gather {group}")
        more, name = self._array(group)
        once: list[str] = []
        turns = 20
        if self.chance(0.02, "wrap") and self.arrays[name].count <= 100:
            others = [x for x, each in self.arrays.items() if each.group == group and x != name]
            once = [self.dice.choice(others)] if others else []
            turns = GENERATIONS - 1
        self.warm.add(group)
        given = {
            "group": group, "array": name, "once": once, "turns": turns, "key": self.key(),
            "plan": self.plan("allreduce", in_segment=False),
        }  # fmt: skip
        return [*steps, *more, Step("often", given, uses=(group, name, *once))]

    def _handle(self) -> list[Step]:
        if len(self.handles) > 5:
            return []
        group = self.some_group()
        kind = self.dice.choice(_KINDS)
        whole = kind != "average" and self.chance(0.3)
        dtype = self.dice.choice(("int32", "int64") if whole else FLOATS)
        count = self.count(group, kind)
        before = self.free(f"gather {group}")
        segment, at = self._place(group, count * 8)
        name = self.name("h")
        self.handles[name] = Object(group, dtype, count, kind, segment)
        plan = self.plan(kind, bool(segment))
        out = self.chance(0.15) and plan != "gdraa-direct"
        root = self.dice.randrange(len(self.groups[group]))
        rooted = kind in ("reduce", "broadcast") and plan is not None
        given = {
            "group": group, "kind": kind, "dtype": dtype, "count": count, "plan": plan,
            "segment": segment, "at": at, "out": out, "root": root if rooted else None,
            **self.attempts(feature="creation"),
        }  # fmt: skip
        return [*before, Step("handle", given, name, (group, segment) if segment else (group,))]

    def _run_handle(self) -> list[Step]:
        if not self.handles:
            return self._handle()
        name = self.dice.choice(list(self.handles))
        before = self.free(name)
        held = self.hold({name}, False)
        given = {
            "handle": name, "key": self.key(), "held": held, **self.attempts(),
            "start": [self.chance(0.4) for _ in range(self.world.size)],
        }  # fmt: skip
        return [*before, Step("run", given, uses=(name,))]

    def _exchange(self) -> list[Step]:
        if len(self.exchanges) > 3:
            return []
        group = self.some_group()
        kind = self.dice.choice(("average", "sum", "update", "update"))
        layers = [[self.dice.choice((1, 7, 33, 100, 1000)), self.dice.choice(FLOATS)]
                  for _ in range(self.dice.randint(1, 4))]  # fmt: skip
        before = self.free(f"gather {group}")
        name = self.name("x")
        self.exchanges[name] = Object(group, kind=kind, layers=len(layers))
        plan = self.plan(kind, True)
        given = {
            "group": group, "kind": kind, "layers": layers, "plan": plan,
            "bucket_bytes": self.dice.choice((0, 0, 500)), **self.attempts(feature="creation"),
        }  # fmt: skip
        return [*before, Step("exchange", given, name, (group,))]

    def _iterate(self) -> list[Step]:
        if not self.exchanges:
            return self._exchange()
        name = self.dice.choice(list(self.exchanges))
        before = self.free(name)
        held = self.hold({name}, False)
        layers, size = range(self.exchanges[name].layers), self.world.size
        given = {
            "exchange": name, "key": self.key(), "held": held, **self.attempts(),
            "ready": [self.dice.sample(layers, len(layers)) for _ in range(size)],
            "wait": [self.dice.sample(layers, len(layers)) for _ in range(size)],
            "finish": [self.chance(0.2) for _ in range(size)],
            "turns": [self.dice.choice((0, 0, 1, 3)) for _ in range(size)],
        }  # fmt: skip
        return [*before, Step("iterate", given, uses=(name,))]

    # --- what goes wrong

    def _wrong(self) -> list[Step]:
        kinds: list[tuple[str, str]] = [(what, "") for what in WRONG[""]]
        for objects, kind in ((self.segments, "segment"), (self.exchanges, "exchange")):
            if objects:
                on = self.dice.choice(list(objects))
                kinds += [(what, on) for what in WRONG[kind]]
        what, on = self.dice.choice(kinds)
        size = self.world.size
        who = [self.chance(0.5) for _ in range(size)] if self.chance(0.4) else [False] * size
        who[self.dice.randrange(size)] = True
        given = {"call": what, "on": on, "who": who}
        return [Step("wrong", given, uses=(on,) if on else ())]

    def _look(self) -> list[Step]:
        who = [self.chance(0.5) for _ in range(self.world.size)]
        return [*self.free("gather world"), Step("look", {"who": who}, self.name("l"))]

    def _threads(self) -> list[Step]:
        """Two threads in one collective, one of them refused; or each in its own."""
        if self.chance(0.4):
            everybody = tuple(range(self.world.size))
            alike = [name for name, ranks in self.groups.items() if ranks == everybody]
            steps = self.complete()
            while len(alike) < 2:
                alike.append(self.name("g"))
                self.groups[alike[-1]] = everybody
                steps.append(Step("group", {"ranks": everybody, **self.attempts()}, alike[-1]))
            pair = self.dice.sample(alike, 2)
            self.warm.update(pair)
            given = {
                "groups": pair, "key": self.key(),
                "turns": self.dice.choice((1, 3, 6)), "plan": self.dice.choice(SUMS),
            }  # fmt: skip
            return [*steps, Step("apart", given, uses=tuple(given["groups"]))]
        several = [name for name, ranks in self.groups.items() if len(ranks) > 1]
        group = self.dice.choice(several)
        what = self.dice.choice(("allreduce", "allreduce", "segment", "barrier", "reduce"))
        before = self.free(*(f"{family} {group}" for family in
                              ("allreduce", "gather", "barrier", "reduce")))  # fmt: skip
        if what == "allreduce":
            self.warm.add(group)
        given = {
            "group": group, "call": what, "key": self.key(), "count": self.count(group, ""),
            "plan": self.dice.choice(SUMS), "rank": self.dice.choice(self.groups[group]),
        }  # fmt: skip
        return [*before, Step("together", given, uses=(group,))]

    def _give_up(self) -> list[Step]:
        """A rank never joins an execution of a handle, or all abandon it; then the handle goes."""
        if not self.handles:
            return self._handle()
        name = self.dice.choice(list(self.handles))
        before = self.free(name)
        ranks = self.groups[self.handles.pop(name).group]
        given = {
            "handle": name, "key": self.key(), **self.attempts(), **self._end(("close", "del")),
            "absent": self.dice.choice(ranks) if self.chance(0.7) else None,
        }  # fmt: skip
        return [*before, Step("give_up", given, uses=(name,))]

    def _hook_raises(self) -> list[Step]:
        """An exchange whose owners' update raises, on all ranks: each owns a part."""
        group = self.some_group()
        given = {
            "group": group, "key": self.key(), "plan": self.dice.choice(("gdraa", "ring")),
            "count": 64 * len(self.groups[group]), "good": self.dice.choice((0, 0, 1, 2)),
            **self.attempts(), **self._end(("close", "del", "with")),
        }  # fmt: skip
        return [*self.free(f"gather {group}"), Step("hook_raises", given, uses=(group,))]

    def _end(self, ways: tuple[str, ...]) -> dict[str, Any]:
        """How each rank gives an object up."""
        return {"how": [self.dice.choice(ways) for _ in range(self.world.size)]}

    def _drop(self) -> list[Step]:
        kinds = [self.handles, self.exchanges, self.segments, self.arrays]
        objects = self.dice.choice([each for each in kinds if each] or [{}])
        if not objects:
            return []
        name = self.dice.choice(list(objects))
        steps = self.free(name)
        gone = [name]
        if objects is self.segments:  # with all that it contains
            steps = self.complete()
            for others in (self.handles, self.arrays):
                for other in [o for o, each in others.items() if each.segment == name]:
                    gone.insert(0, other)
                    del others[other]
        del objects[name]
        ways = ("del",) if objects is self.arrays else ("close", "close", "del", "with")
        return [*steps, Step("drop", {"names": gone, **self._end(ways)}, uses=tuple(gone))]

    def _leave(self) -> list[Step]:
        """A rank leaves, with or without a farewell; the survivors make a group and go on."""
        size = self.world.size
        gone = self.dice.randrange(size)
        how = self.dice.choice(("close", "raise", "kill"))
        dropped = [self.chance(0.5) for _ in range(size)]
        steps = [
            *self.free("barrier world"),
            Step("leave", {"rank": gone, "how": how, "dropped": dropped}, "gone"),
        ]
        return steps + self.go_on(gone)

    def go_on(self, gone: int) -> list[Step]:
        """All but rank ``gone`` make a group and go on."""
        left = [rank for rank in range(self.world.size) if rank != gone]
        self.held.clear()
        self.ordered.clear()
        self.groups = {"left": tuple(left)}
        for objects in (self.segments, self.arrays, self.handles, self.exchanges):
            objects.clear()
        self.warm.clear()
        self.features = self.features - {"threads"}
        steps = [Step("survivors", {"rank": gone}, "left", ("gone",))]
        steps += self._allreduce_left() + self._handle_left() + self._exchange_left()
        return steps + self.complete()

    def _allreduce_left(self) -> list[Step]:
        array = self.name("a")
        given = {"group": "left", "dtype": "float32", "count": 100, "segment": "", "at": 0}
        steps = [Step("array", given, array, ("left",))]
        for _ in range(2):
            given = {
                "group": "left", "array": array, "op": "mean", "key": self.key(), "held": "",
                "plan": None, "other": [False] * self.world.size,
                **self.attempts(feature="creation"),
            }  # fmt: skip
            steps.append(Step("allreduce", given, uses=("left", array)))
        return steps

    def _handle_left(self) -> list[Step]:
        name = self.name("h")
        self.handles[name] = Object("left")
        given = {
            "group": "left", "kind": "sum", "dtype": "int32", "count": 100, "plan": "gdraa",
            "segment": "", "at": 0, "out": False, "root": None, "lag": [0.0] * self.world.size,
            "attempts": [[]] * self.world.size,
        }  # fmt: skip
        return [Step("handle", given, name, ("left",)), *self._run_handle(), *self._run_handle()]

    def _exchange_left(self) -> list[Step]:
        return [*self._exchange(), *self._iterate(), *self._iterate()]
