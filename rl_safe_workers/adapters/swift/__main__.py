"""Prints the path of the plugin, for ms-swift's ``--external_plugins``."""

from __future__ import annotations

import sys
from pathlib import Path

# The plugin is alone in its folder, because ms-swift puts that folder first on the import path.
PLUGIN = Path(__file__).parent / "plugin" / "rl_safe_swift_plugin.py"

if __name__ == "__main__":
    sys.stdout.write(f"{PLUGIN}\n")
