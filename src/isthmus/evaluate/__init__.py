"""`isthmus eval`: the tasks of lm-evaluation-harness, run by the engine in this process or by a server."""
