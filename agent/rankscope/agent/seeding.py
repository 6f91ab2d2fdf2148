"""seed_all: one call that fixes what is random in a run, as msProbe's does.

The replacements made for `rm_dropout` and `is_enhanced` stay for the life of the process; a later
call changes the seed they use. Functions that a module bound before the call keep their behaviour.
"""

import functools
import os
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rankscope.agent.errors import ConfigError

LARGEST_SEED = 2**32 - 1

_DROPOUTS = ("dropout", "dropout2d", "dropout3d")
TORCH_RANDOM = (
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
)
TENSOR_RANDOM = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)
_NOT_DRAWING = ("seed", "getstate", "setstate", "get_state", "set_state")

_repeat_seed: int | None = None  # what each call of a random function starts from


def seed_all(
    seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False
) -> None:
    """Seed random, numpy and torch on every device; `mode` switches torch's deterministic
    algorithms. `rm_dropout` makes dropout do nothing. `is_enhanced` makes each call of a random
    function start from the seed, so that two equal calls give equal values."""
    _check(seed, mode, rm_dropout, is_enhanced)
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes started from here
    _seed_generators(seed)
    torch.use_deterministic_algorithms(mode)
    if torch.cuda.is_available():
        torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    if "torch_npu" in sys.modules:
        os.environ["HCCL_DETERMINISTIC"] = "True"
    if rm_dropout:
        _remove_dropout()
    if is_enhanced:
        _repeat_from(seed)


def _check(seed: Any, mode: Any, rm_dropout: Any, is_enhanced: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(
            f"seed_all: seed {seed!r} is not allowed; allowed: a whole number, 0 to {LARGEST_SEED}"
        )
    flags = {"mode": mode, "rm_dropout": rm_dropout, "is_enhanced": is_enhanced}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"seed_all: {name} {value!r} is not allowed; allowed: True, False")


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU and every device torch itself knows
    npu = sys.modules.get("torch_npu")
    if npu is not None:
        npu.npu.manual_seed(seed)
        npu.npu.manual_seed_all(seed)


def _remove_dropout() -> None:
    for name in _DROPOUTS:
        _replace(F, name, _without_dropout)


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return original(input, 0.0, training, inplace)

    return dropout


def _repeat_from(seed: int) -> None:
    global _repeat_seed
    replaced = _repeat_seed is not None
    _repeat_seed = seed
    if replaced:
        return
    for name in _drawing_functions(random):
        _replace(random, name, _starting_over(random.seed))
    for name in _drawing_functions(np.random):
        _replace(np.random, name, _starting_over(np.random.seed))
    for owner, names in ((torch, TORCH_RANDOM), (torch.Tensor, TENSOR_RANDOM)):
        for name in names:
            _replace(owner, name, _starting_over(_seed_torch))


def _drawing_functions(module: ModuleType) -> list[str]:
    """Module functions that draw from the module's own generator: methods of one hidden object."""
    generator = module.uniform.__self__
    return [
        name
        for name in module.__all__
        if name not in _NOT_DRAWING
        and getattr(getattr(module, name), "__self__", None) is generator
    ]


def _starting_over(reseed: Callable[[int], Any]) -> Callable[[Callable[..., Any]], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            assert _repeat_seed is not None
            reseed(_repeat_seed)
            try:
                return original(*args, **kwargs)
            finally:
                reseed(_repeat_seed)  # what is not replaced (dropout) goes on from the seed as well

        return draw

    return wrap


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Once per function, however often seed_all is called."""
    original = getattr(owner, name)
    if getattr(original, "_rankscope_seeding", False):
        return
    replacement = wrap(original)
    replacement._rankscope_seeding = True
    replacement._rankscope_original = original  # by which records are named
    setattr(owner, name, replacement)
