"""The OpenAI-compatible server: a front that speaks HTTP, and the engine in a process of its own behind it."""
