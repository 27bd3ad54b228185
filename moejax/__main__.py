"""`python -m moejax` is the `moejax` command."""

import sys

from moejax.cli import main


sys.exit(main())
