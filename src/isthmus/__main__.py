"""`python -m isthmus` is the command `isthmus`."""

import sys

from isthmus.cli import main

sys.exit(main())
