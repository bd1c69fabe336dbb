"""Virtual time: the real scheduler, pool and prefix cache, and a model of what a step costs instead of a device.

traces, arrivals    what comes when
shape, machine      what a step reads and computes, and how long that takes
simulation          the loop, and what came of it
"""
