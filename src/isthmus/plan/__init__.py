"""What fits, before there is a GPU: a model's shape, a budget of bytes, and the pool and scheduler that serve."""
