"""Starts processes fast: one that has imported the slow libraries forks, nothing has run in it yet.

    python nursery.py MODULE...      (commands as JSON lines on stdin, answers on stdout)

Each child is a process like any other: its own identity, main thread and way to end. Only exec is
missing; what is to be tried with it is started without a nursery.
"""

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time


class Child:
    """A process of a nursery, with as much of Popen as is needed."""

    def __init__(self, pid, changed):
        self.pid, self.returncode, self.ended_at = pid, None, None
        self._changed = changed

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        """The exit status, negative for a signal."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode


class Nursery:
    """Children share the imported modules; `start` may be called from any thread."""

    def __init__(self, *preload):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._started = None
        self._children = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, script, *arguments, environ, output):
        """Run a script or module as __main__ with its output appended to a file."""
        command = [str(script), list(map(str, arguments)), environ, str(output)]
        with self._starting:
            self._started = None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            with self._changed:
                found = self._changed.wait_for(lambda: self._started is not None, 120)
                assert found, "the nursery started nothing"
                return self._started

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            word, pid, *more = line.split()
            with self._changed:
                if word == "started":
                    self._started = self._children[int(pid)] = Child(int(pid), self._changed)
                else:
                    child = self._children[int(pid)]
                    child.ended_at, child.returncode = float(more[1]), int(more[0])
                self._changed.notify_all()


def _serve(preload):
    for module in preload:
        importlib.import_module(module)
    commands, rest = sys.stdin.fileno(), b""
    alive = 0
    while True:
        if select.select([commands], [], [], 0.005)[0]:
            got = os.read(commands, 1 << 16)
            if not got:
                return None
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return json.loads(line)
                alive += 1
                _tell("started", pid)
        while alive and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            alive -= 1
            _tell("ended", ended[0], os.waitstatus_to_exitcode(ended[1]), time.monotonic())


def _tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _become(script, arguments, environ, output):
    os.environ.clear()
    os.environ.update(environ)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for ours, theirs in ((null, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.closerange(3, 64)
    sys.argv = [script, *arguments]
    if os.sep in script:
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    command = _serve(sys.argv[1:])
    if command is not None:
        _become(*command)
