"""Measurements: the memory core, throughput of a model, unified against static. Each prints JSON on request."""
