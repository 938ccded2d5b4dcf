"""Puts our plugin where Hydra looks for plugins. It refuses a run of verl that would silently not use our engines."""

from rl_safe_workers.adapters.verl.search_path import SafeSearchPath as SafeSearchPath
