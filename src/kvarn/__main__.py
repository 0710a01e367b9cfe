"""`python -m kvarn` is the command `kvarn`."""

import sys

from kvarn.cli import main

sys.exit(main())
