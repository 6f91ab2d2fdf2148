"""Looking at runs and comparing them: where does it start?

The way of a comparison, one module a step:

- `sides`     a run or a dump directory, as one table of leaves
- `dumps`     reads dump.json, stack.json and construct.json into that table
- `pairing`   which steps, ranks, records and arguments belong together
- `tensors`   reads whole tensors without torch; `elementwise` compares them
- `figures`   differences of two columns of leaves, and how far each is off
- `noise`     whether the pair differs by rounding everywhere, and what counts as a difference then
- `flow`      the first divergence of each rank; `origin` the first of all ranks
- `verdicts`  a verdict and a reason for each row; `advice` what to look at next
- `compare`   puts these together; `report_*` write tables, sheets and pages

`check` looks at one run in the same way.
"""
