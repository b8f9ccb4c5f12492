"""Sets up kvedge in a clone and runs it: python3 scripts/dev.py demo. See dev_commands.py."""

import sys

# This file must be valid in any Python 3, so that an old Python prints this sentence and no syntax error.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("error: kvedge needs Python 3.10 or newer, this is " + sys.version.split()[0])

from dev_commands import main

if __name__ == "__main__":
    sys.exit(main())
