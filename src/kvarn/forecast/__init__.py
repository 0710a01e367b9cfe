"""What a model will need and how fast it will be, before its weights are loaded; and what is true, after.

    outlined    a model without its numbers: its sizes, and the work of a step
    work        what a step reads and computes, from the graph
    memory      bytes: weights, cache, workspace, process; device: those on a device
    rates       seconds per byte and per multiplication of a machine; machine: measured, kept, refreshed
    speed       seconds of a step, of a prompt
    room        what would fit instead
    forecast    puts them together; truth: the same facts, measured; report: both as JSON

`kvarn plan` prints forecasts. The word plan is the cache's: its sizes and offsets (cache/plan.py).
"""
