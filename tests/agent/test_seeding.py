"""seed_all, each time in a process of its own: it changes torch, numpy and random for good."""

import subprocess
import sys
from typing import Any

import pytest

from rankscope.agent.errors import ConfigError
from rankscope.agent.seeding import seed_all


def run(code: str) -> list[str]:
    """Lines printed by `code`, which runs with everything imported."""
    head = """
import os, random
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from rankscope.agent.seeding import seed_all
ones = torch.ones(8)
def twice(draw):
    print([repr(draw()) for _ in range(2)])
"""
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed -1 is not allowed; allowed: a whole number, 0 to 4294967295"),
        ({"seed": 2**32}, "seed 4294967296"),
        ({"seed": True}, "seed True"),
        ({"seed": "1"}, "seed '1'"),
        ({"mode": 1}, "mode 1 is not allowed; allowed: True, False"),
        ({"rm_dropout": None}, "rm_dropout None"),
        ({"is_enhanced": "yes"}, "is_enhanced 'yes'"),
    ],
)
def test_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        seed_all(**arguments)


def test_streams_are_those_of_the_seeded_generators() -> None:
    out = run(
        """
def draw():
    print(random.random(), np.random.rand(), torch.randn(3).tolist(), F.dropout(ones).tolist())
random.seed(77), np.random.seed(77), torch.manual_seed(77)
draw(), draw()
seed_all(77)
draw(), draw()
print(os.environ["PYTHONHASHSEED"])
seed_all(mode=True)
print(torch.initial_seed(), torch.are_deterministic_algorithms_enabled())
seed_all(mode=False)
print(torch.are_deterministic_algorithms_enabled())
"""
    )
    assert out[2:4] == out[:2]
    assert out[0] != out[1]
    assert out[4:] == ["77", "1234 True", "False"]


def test_dropout_is_removed_where_msprobe_removes_it() -> None:
    out = run(
        """
early = nn.Dropout(0.5)
seed_all(rm_dropout=True)
seed_all(rm_dropout=True)
planes = torch.ones(1, 8, 2, 2)
for y in (F.dropout(ones), F.dropout(ones, 0.9, True), F.dropout(ones, p=0.3, training=True),
          nn.Dropout(0.5)(ones), early(ones), F.dropout2d(planes), nn.Dropout2d(0.5)(planes),
          F.dropout3d(planes), nn.Dropout3d(0.5)(planes)):
    assert torch.equal(y, torch.ones_like(y))
x = torch.ones(3)
assert F.dropout(x, inplace=True) is x
print(bool((F.alpha_dropout(torch.ones(64), 0.5, True) == 1).all()), nn.Dropout(0.5).p)
"""
    )
    assert out == ["False 0.5"]


#: Each drawn twice after seed_all(1234, is_enhanced=True); values as msProbe gives them.
REPEATED = {
    "torch.randn(2).tolist()": "[0.0461304634809494, 0.4024028182029724]",
    "torch.rand(2).tolist()": "[0.028979241847991943, 0.4018985629081726]",
    "torch.randint(0, 1000, (3,)).tolist()": "[775, 171, 806]",
    "torch.rand_like(torch.ones(2)).tolist()": "[0.028979241847991943, 0.4018985629081726]",
    "torch.normal(0.0, 1.0, (2,)).tolist()": "[0.0461304634809494, 0.4024028182029724]",
    "torch.multinomial(torch.ones(6), 3).tolist()": "[1, 0, 5]",
    "torch.poisson(torch.ones(3) * 5).tolist()": "[3.0, 3.0, 4.0]",
    "torch.empty(2).normal_().tolist()": "[0.0461304634809494, 0.4024028182029724]",
    "torch.empty(3).geometric_(0.5).tolist()": "[3.0, 4.0, 2.0]",
    "random.random()": "0.9664535356921388",
    "random.randint(0, 1000)": "989",
    "random.sample(range(100), 3)": "[99, 56, 14]",
    "random.getrandbits(16)": "63337",
    "float(np.random.rand())": "0.1915194503788923",
    "np.random.randint(0, 1000, 2).tolist()": "[815, 723]",
    "np.random.permutation(6).tolist()": "[2, 1, 5, 0, 4, 3]",
}


def test_enhanced_repeats_each_random_function() -> None:
    draws = "\n".join(f"twice(lambda: {draw})" for draw in REPEATED)
    out = run(
        f"""
seed_all(1234, is_enhanced=True)
{draws}
for seed in (1, 2, 2):
    seed_all(seed, is_enhanced=True)
    print(torch.randn(2).tolist())
"""
    )
    values = list(REPEATED.values())
    assert out[: len(values)] == [repr([value, value]) for value in values]
    first, second, third = out[len(values) :]
    assert first != second
    assert second == third


def test_enhanced_leaves_own_generators_and_dropout_alone() -> None:
    out = run(
        """
def draw():
    own, state = torch.Generator().manual_seed(3), np.random.RandomState(3)
    rng, python = np.random.default_rng(3), random.Random(3)
    torch.manual_seed(1234)
    print([[torch.rand(2, generator=own).tolist(), state.rand(), rng.random(), python.random()]
           for _ in range(2)])
    torch.manual_seed(1234)
    print(F.dropout(ones).tolist(), F.dropout(ones).tolist())
draw()
seed_all(1234, is_enhanced=True)
draw()
"""
    )
    assert out[2:] == out[:2]
