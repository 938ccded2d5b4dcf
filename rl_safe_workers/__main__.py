"""Makes ``python -m rl_safe_workers`` the same command as ``rl-safe``."""

import sys

from rl_safe_workers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
