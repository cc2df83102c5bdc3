"""Where runs live: a process that carries runs from step to step under leases.

`main` puts the process together. `cycle` is the loop of a run's life and holds all control flow; the other
files are its leaves: `held` and `draft` (a run under our lease, and what a step writes), `model_calls`,
`tool_calls` and `self_tools` (what a step does), `slots`, `doorbell` and `supervisor` (which runs live here,
and whether they still may), `sweeper` (what others left undone). The rules are in `espalier_domain`, the
writing in `espalier_acts`; this process decides nothing by itself.
"""
