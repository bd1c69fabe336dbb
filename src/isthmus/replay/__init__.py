"""`isthmus replay`: execute a journal again, check it, say what happened, and draw it."""
