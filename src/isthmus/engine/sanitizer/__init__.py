"""`--check-memory`: faults of memory are found, named and fenced while everybody else is served on.

guard.py      the pool whose doors refuse strange ids and keep fenced ones
books.py      audit: after each step the CPU's own books are compared with each other
shadow.py     full: who owns every page and what it holds, built from deltas and block writes alone
claims.py     full: what a step reads and writes, held against the shadow before it is launched
mirrors.py    full: the device's tables and results, after it ran
sanitizer.py  the executor that does all this around another one, and ends, fences and reports
"""

from isthmus.engine.sanitizer.guard import GuardedPool
from isthmus.engine.sanitizer.sanitizer import Sanitizer

__all__ = ["GuardedPool", "Sanitizer"]
