"""Paged attention and page movement, one module per backend; `reference` is the meaning of all of them."""
