"""Two processes fed the same events decide the same, whatever order their hashes have."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from helpers_tiers import PAGE_BYTES, PAGE_TOKENS, World

from sglang_graft.cache import Prices, make_policy, policy_names

EVENTS = 1500
KINDS = {"ask": 2, "step": 3, "copy": 3, "end": 2, "grow": 1, "other": 1}


def history(policy: str, seed: int) -> str:
    """What a random history of a small pool decided, as a hash of all of it."""
    source = random.Random(seed)
    prices = Prices(PAGE_BYTES, PAGE_TOKENS, host_tier=True)
    world = World(16, 24, make_policy(policy, prices), patience=2)
    for number in range(5):
        world.register(number, 1 + number)
        world.settle()
    for _ in range(EVENTS):
        (kind,) = source.choices([*KINDS], [*KINDS.values()])
        if kind == "ask":
            run = tuple(source.choices([0, 1], k=source.randint(1, 4)))
            world.enqueue(source.choice([None, *range(5)]), run, source.choice(["", "s"]))
        elif kind == "step":
            world.step()
        elif kind == "copy":
            for queue in source.choices(["forward", "load", "store"], k=12):
                world.copier.advance(queue)
            world.executor.advance(source.randrange(8))
        elif kind == "end":
            world.finish(source.randrange(8))
        elif kind == "grow":
            world.decode()
        else:
            number = source.randrange(5)
            world.unload(number)
            world.register(number, 1 + number)
            world.abort(source.randrange(8))
    assert world.counters.total.loads > 10, world.counters.total
    decided = repr((world.log, world.host._stack, world.counters))
    return hashlib.sha256(decided.encode()).hexdigest()


def decided_with(hash_seed: str) -> list[str]:
    here = Path(__file__)
    paths = [*sys.path, str(here.parents[2])]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_the_order_of_hashes_decides_nothing() -> None:
    one, two = decided_with("1"), decided_with("2")
    assert len(one) == len(policy_names())
    assert one == two


if __name__ == "__main__":
    for name in policy_names():
        print(history(name, seed=5))
