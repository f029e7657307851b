"""`python -m mimicfl` is the command `mimicfl`."""

import sys

from .cli.main import main

sys.exit(main())
