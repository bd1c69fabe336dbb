"""Isthmus serves hybrid language models from one arena of memory."""

__version__ = "0.1.0"
