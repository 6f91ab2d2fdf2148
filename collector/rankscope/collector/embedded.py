"""The collector that an agent starts for its host and dump path.

`python -m rankscope.collector.embedded --run RUN` detaches from whoever started it (own session, no
descriptors of theirs) and holds RUN.rankscope/lock; one that finds the lock held ends at once with
status 0. RUN.rankscope/port says where it listens, RUN.rankscope/collector.log what it did.

It ends 2 s after the last goodbye with nothing left to do, 60 s after the last stream was lost,
60 s after its start when nobody comes, and at once when its folder is deleted.
"""

import argparse
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.collector.daemon import LazyRuns
    from rankscope.collector.server import Servicer

DONE_SECONDS = 2.0
LOST_SECONDS = 60.0
_CHECK_SECONDS = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="rankscope.collector.embedded", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder for step{N}/")
    parser.add_argument("--foreground", action="store_true", help="stay in the caller's session")
    options = parser.parse_args(arguments)
    run_path = Path(os.path.abspath(options.run))
    side_path = run_path.with_name(run_path.name + ".rankscope")
    side_path.mkdir(parents=True, exist_ok=True)
    lock = os.open(side_path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    # With the lock: from here on it is held until the collector ends, however it does.
    if not options.foreground and not detach(lock):
        return 0
    if not options.foreground:
        redirect_streams(side_path / "collector.log")
    return _serve(run_path, side_path)


def detach(kept: int) -> bool:
    """Go on as a grandchild in a session of its own, with no descriptor but `kept`; True there,
    False in the process that ends.

    So the starter has no child that it, or its process manager, would wait for or kill.
    """
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    os.chdir("/")
    return True


def redirect_streams(log: Path) -> None:
    """Standard output and error go to the log file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _serve(run_path: Path, side_path: Path) -> int:
    import asyncio
    import logging

    from rankscope.collector import daemon, server
    from rankscope.collector.config import Config

    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(message)s",
        stream=sys.stdout,
    )
    config = Config.from_env()
    collector_id = f"{daemon.host_id()}-embedded"

    def make() -> Any:
        from rankscope.collector.runs import Runs

        return Runs(config, collector_id, server.VERSION, run_path=run_path)

    life = Life(side_path)
    asyncio.run(
        daemon.serve(
            daemon.LazyRuns(make),
            config,
            "127.0.0.1:0",
            collector_id=collector_id,
            port_file=side_path / "port",
            life=life.live,
        )
    )
    return 0


class Life:
    """Decides when an embedded collector ends."""

    def __init__(self, side_path: Path) -> None:
        self._side_path = side_path
        self._folder = side_path.stat().st_ino

    async def live(self, runs: "LazyRuns", servicer: "Servicer") -> None:
        """Return when nobody needs the collector any more."""
        import asyncio

        await asyncio.to_thread(runs.get)
        spool = self._side_path / "spool"
        await asyncio.to_thread(runs.get().take_in, spool)
        quiet_since = time.monotonic()
        looked = False
        while self._is_there(runs):
            await asyncio.sleep(_CHECK_SECONDS)
            services = runs.get().open()
            if servicer.streams or any(service.is_busy() for service in services):
                quiet_since = time.monotonic()
                looked = False
                continue
            waiting = not servicer.ever or any(s.committer.positions.waiting() for s in services)
            patience = LOST_SECONDS if waiting else DONE_SECONDS
            quiet = time.monotonic() - quiet_since
            if quiet < patience:
                continue
            if looked:
                return
            looked = True  # somebody may have died without ever reaching us
            await asyncio.to_thread(runs.get().take_in, spool)

    def _is_there(self, runs: "LazyRuns") -> bool:
        try:
            same = self._side_path.stat().st_ino == self._folder
        except OSError:
            return False
        return same and not any(s.is_closed() for s in runs.get().open())


if __name__ == "__main__":
    sys.exit(main())
