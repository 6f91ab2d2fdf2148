"""The chaos suite: real processes, one fault each, and one assertion for all of them.

`rows` is the table of faults. `stage` sets one up and runs it, with `nursery` (processes that start
fast), `proxy` (a network that misbehaves) and `job` (a training script that says what it recorded).
`verdict` compares what was produced with what is stored.
"""
