"""Models: finding, reading and preparing them."""
