"""How many rows a second are rendered: `python tests/collector/measure_render.py`."""

import time

from conftest import Events, scalar, tensor

from rankscope.collector.render import Header, render

CALLS = 660


def typical_step() -> Events:
    """One process's step of 660 API calls: three events and four leaves each."""
    events = Events()
    numbers = {"max": 1.25, "min": -0.5, "mean": 0.125, "norm": 3.5}
    inputs = {"input_args": [0, 1], "input_kwargs": {"dim": 2}}
    for call in range(CALLS):
        name = f"Functional.linear.{call}.forward"
        leaf = tensor(shape=[4, 128, 256], **numbers)
        events.data(name, "input", inputs, leaf, leaf, scalar("int", str(call % 7)))
        events.data(name, "output", {"output": [0]}, leaf)
        events.node(name, stack=call % 40 + 1, parent="Module.blocks.0.Block.forward.0")
    return events


def main() -> None:
    events = typical_step()
    nodes, records = events.nodes(), events.records()
    stacks = {number: ["File model.py, line 3, in forward, \n return f(x)"] for number in range(41)}
    header = Header("statistics", "mix", "statistics", "low", True, None)
    seconds = []
    for _ in range(15):
        start = time.process_time()
        documents = render(nodes, records, stacks, header)
        seconds.append(time.process_time() - start)
    size = len(documents["dump.json"])
    rate = records.num_rows / sorted(seconds)[7]
    print(f"{records.num_rows} rows, {size} bytes of dump.json: {rate:.0f} rows/s of CPU (median)")


if __name__ == "__main__":
    main()
