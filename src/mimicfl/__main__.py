"""`python -m mimicfl` is the command `mimicfl`."""

import sys

from mimicfl_command import main

sys.exit(main())
