"""The rules: what an agent's run does next, what it may spend, and what it tells the world.

Pure functions over frozen values. No I/O, no clock, no `async`, no wire status: time and identity come in
as arguments, so an agent's whole behaviour can be tested with lists.

`run` is the heart: `next_step` decides. `progress` remembers: `apply` builds what deciding needs from the
entries of `journal`; `telling` is what readers see of them. `history` turns the same record into what
the model is shown.
"""
