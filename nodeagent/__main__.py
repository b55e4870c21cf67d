"""`python -m nodeagent`."""

import sys

from nodeagent.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
