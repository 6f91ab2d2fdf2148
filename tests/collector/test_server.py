"""Limits and settings of the server."""

import asyncio

import pytest

from rankscope.collector.config import Config, ConfigError
from rankscope.collector.daemon import remove_port_file, write_port_file
from rankscope.collector.server import Budget


def test_a_budget_waits_for_room_and_lets_the_oversized_pass_alone():
    async def play():
        budget, log = Budget(10), []

        async def take(name, size):
            await budget.take(size)
            log.append(name)

        await take("first", 6)
        waiting = [asyncio.create_task(take(n, s)) for n, s in (("small", 4), ("huge", 50))]
        await asyncio.sleep(0)
        assert log == ["first", "small"]
        budget.give_back(6)
        await asyncio.sleep(0.01)
        assert log == ["first", "small"]
        budget.give_back(4)
        await asyncio.gather(*waiting)
        assert log == ["first", "small", "huge"]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Config()),
        ({"RANKSCOPE_SERVE_LAYOUT": "on_demand"}, Config(layout="on_demand")),
        ({"RANKSCOPE_SERVE_COMMIT_ROWS": "5"}, Config(commit_rows=5)),
        ({"RANKSCOPE_SERVE_SEAL_AFTER_SECONDS": "0.5"}, Config(seal_after_seconds=0.5)),
    ],
)
def test_settings_from_the_environment(environ, expected):
    assert Config.from_env(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANKSCOPE_SERVE_LAYOUT": "lazy"}, ["layout", "'lazy'", "eager", "on_demand"]),
        ({"RANKSCOPE_SERVE_COMMIT_ROWS": "many"}, ["COMMIT_ROWS", "'many'", "number"]),
        ({"RANKSCOPE_SERVE_COMMIT_ROWS": "-1"}, ["commit_rows", "-1", "greater than 0"]),
    ],
)
def test_bad_settings_are_named(environ, words):
    with pytest.raises(ConfigError) as error:
        Config.from_env(environ)
    for word in words:
        assert word in str(error.value)


def test_only_the_own_port_file_is_removed(tmp_path):
    path = tmp_path / "port"
    path.write_text('{"pid": 1}')
    remove_port_file(path)
    assert path.exists()
    write_port_file(path, "127.0.0.1:1", "id")
    remove_port_file(path)
    assert list(tmp_path.iterdir()) == []
