"""What a model will need and how fast it will be, before its weights are loaded; and what it needed, after.

    work        what a step reads and computes, from the graph and the sizes of the weights
    memory      bytes: weights, cache, workspace, process
    rates       seconds per byte and per multiplication of a machine; machine: measured, kept, refreshed
    speed       seconds of a step, of a prompt
    room        what would fit instead
    forecast    puts them together; truth: the same facts, measured

`kvarn plan` prints forecasts. The word plan is the cache's: its sizes and offsets (cache/plan.py).
"""
