"""Where Hydra looks for plugins in every process that uses it: ours refuses a run of verl that would go without us."""

from rl_safe_workers.adapters.verl.search_path import SafeSearchPath as SafeSearchPath
