"""How the programs of a stripe in `quantize_rowwise_one_pass.py` wait: a model, in every order.

On a GPU a test sees few orders. The model takes the accesses to global memory one at a time. Among
its orders are those of a GPU that runs one program after the other. No step waits, so every program
ends; the test is that each tile has been cast by then.
"""

from typing import NamedTuple

import pytest

from titan_fp8.kernels.hopper.quantize_rowwise_one_pass import SKIP

GIVE_UP = SKIP.value


class Memory(NamedTuple):
    counter: int = 0
    flags: frozenset = frozenset()
    casts: frozenset = frozenset()


class Program(NamedTuple):
    polls: int
    next: str = "publish"
    published: int = 0
    count: int = 0


def step(memory: Memory, program: Program, tile: int, tiles: int) -> tuple[Memory, Program]:
    """What the program's next access leaves in memory and in its registers."""
    counter = memory.counter
    if program.next == "publish":
        memory = memory._replace(counter=counter + 1)
        return memory, program._replace(next="poll", published=counter + 1, count=counter + 1)
    if program.next == "poll":
        if program.count < tiles and program.polls:
            return memory, program._replace(count=counter, polls=program.polls - 1)
        if program.count % GIVE_UP == tiles:
            return memory, program._replace(next="cast")
        memory = memory._replace(flags=memory.flags | {tile})
        return memory, program._replace(next="give up")
    if program.next == "give up":
        complete = counter % GIVE_UP == tiles
        memory = memory._replace(counter=counter + GIVE_UP)
        return memory, program._replace(next="cast" if complete else "end", count=counter)
    last = program.published % GIVE_UP == tiles
    skipped = memory.flags if last and program.published > GIVE_UP else frozenset()
    memory = memory._replace(casts=memory.casts | {tile} | skipped)
    return memory, program._replace(next="end")


def form(memory: Memory, programs: tuple[Program, ...]) -> tuple:
    """The same for all states that differ only in which tile is whose: all go on alike."""
    flags, casts = memory.flags, memory.casts
    tiles = sorted((each, tile in flags, tile in casts) for tile, each in enumerate(programs))
    return memory.counter, *tiles


@pytest.mark.parametrize("tiles, polls", [(1, 0), (2, 3), (3, 0), (3, 2), (4, 1)])
def test_every_tile_is_cast_in_every_order(tiles, polls):
    pending = [(Memory(), (Program(polls),) * tiles)]
    reached, ends = {form(*pending[0])}, 0
    while pending:
        memory, programs = pending.pop()
        running = [tile for tile in range(tiles) if programs[tile].next != "end"]
        if not running:
            assert memory.casts == set(range(tiles))
            ends += 1
        for tile in running:
            after, program = step(memory, programs[tile], tile, tiles)
            state = after, (*programs[:tile], program, *programs[tile + 1 :])
            if form(*state) not in reached:
                reached.add(form(*state))
                pending.append(state)
    assert ends
