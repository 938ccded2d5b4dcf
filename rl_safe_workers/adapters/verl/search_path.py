"""Our plugin for Hydra's search path. It adds our config group, and refuses a job that would silently use stock verl.

`main_ppo` and `main_sft` register it. Hydra also finds it under verl's own entry, by a module in the namespace package
``hydra_plugins``. With ``VERL_USE_EXTERNAL_PLUGINS=none``, verl's entry loads nothing else of ours.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.errors import ConfigError

CONF = "pkg://rl_safe_workers.adapters.verl.conf"


class SafeSearchPath(SearchPathPlugin):
    """Adds our config group to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends our config group, after verl's own files. Exits if our engines are asked for but would not be loaded.

        Raises:
            SystemExit: If our engines would not be loaded. Hydra would print a traceback for any other exception.
        """
        try:
            environment.check_loadable()
        except ConfigError as error:
            sys.stderr.write(f"rl_safe: {error}\n")
            sys.exit(error.exit_code)
        search_path.append("rl_safe_workers", CONF)
