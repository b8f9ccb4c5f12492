"""Sets up all that kvedge needs and runs it from a clone: python3 scripts/dev.py demo. See dev_commands.py."""

import sys

# This file stays readable for any Python 3, so that an old one gets a sentence and not a syntax error.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("error: kvedge needs Python 3.10 or newer, this is " + sys.version.split()[0])

from dev_commands import main

if __name__ == "__main__":
    sys.exit(main())
