"""Our plugin for Hydra's search path: it finds our config group, and refuses a job whose engines would be stock.

`main_ppo` registers it. As a module of Hydra's namespace package ``hydra_plugins`` it is found under verl's own entry,
too: nothing else of ours is loaded there with ``VERL_USE_EXTERNAL_PLUGINS=none``.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.errors import ConfigError

CONF = "pkg://rl_safe_workers.adapters.verl.conf"


class SafeSearchPath(SearchPathPlugin):
    """Lets Hydra find our config group."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends it: verl's own files come first. Ends the process if our engines are asked for and cannot be loaded.

        Raises:
            SystemExit: Then; Hydra would show a traceback of any other exception.
        """
        try:
            environment.check_loadable()
        except ConfigError as error:
            sys.stderr.write(f"rl_safe: {error}\n")
            sys.exit(error.exit_code)
        search_path.append("rl_safe_workers", CONF)
