"""`offbeat doctor --gpu`: does everything that a run on a GPU needs work on this machine?

session.py   runs the parts, each in a process of its own with a deadline, and writes the report
machine.py   what the machine is, and how fast it copies; what a run says about a machine that was not checked
kernels.py   flex_attention on packed rows against plain rows
run.py       three steps of training with the engine; an engine that sleeps and wakes

Each part takes a device. On `cpu` the same code runs without a GPU. What tests offbeat and not the machine is in
`tests/gpu/`.
"""
