"""Records in processes of unusual kinds: process_job.py SCENARIO CONFIG.json."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch

from rankscope.agent import PrecisionDebugger

CALLS = 7


def work(config, steps=2):
    """`steps` whole steps and one that is left open, CALLS records each."""
    debugger = PrecisionDebugger(config_path=config)
    for step in range(steps + 1):
        debugger.start()
        for _ in range(CALLS):
            torch.relu(torch.ones(3))
        if step < steps:
            debugger.stop()
            debugger.step()
    return debugger


def in_child(method, config):
    child = multiprocessing.get_context(method).Process(target=work, args=(config,))
    child.start()
    child.join()
    assert child.exitcode == 0


def in_pool(config):
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        pool.apply(work_silently, (config,))
        pool.close()
        pool.join()


def work_silently(config):
    work(config)


def first_of_container(config):
    """Pid 1: SIGTERM does not end it, so it goes on as it would without us."""
    assert os.getpid() == 1
    debugger = work(config, 1)
    os.kill(1, signal.SIGTERM)
    time.sleep(0.1)
    debugger.stop()
    debugger.step()
    work(config, 0)


def two_libraries(config):
    first = work(config)
    second = PrecisionDebugger(dump_path="/elsewhere", level="L0")
    assert second is first
    assert PrecisionDebugger() is first
    second.start()  # beside the first one's: nothing is recorded twice
    torch.relu(torch.ones(3))


def device_fault(config):
    work(config)
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def abort(config):
    work(config)
    time.sleep(1.0)  # longer than the flush
    os.abort()


def exit_of_another(config):
    """Another's exit handler, registered before us, ends the process after ours has run."""
    atexit.register(os._exit, 6)
    work(config)


def exit_in_thread(config):
    """The main thread ends first; the last records come from a thread, which then exits."""

    def last():
        threading.main_thread().join()
        work(config)
        sys.exit(3)  # of the thread alone

    threading.Thread(target=last).start()


SCENARIOS = {
    function.__name__: function
    for function in (in_pool, first_of_container, two_libraries, device_fault, abort)
} | {function.__name__: function for function in (exit_of_another, exit_in_thread)}

if __name__ == "__main__":
    scenario, config = sys.argv[1:]
    if scenario in ("spawn", "forkserver", "fork"):
        in_child(scenario, config)
    else:
        SCENARIOS[scenario](config)
