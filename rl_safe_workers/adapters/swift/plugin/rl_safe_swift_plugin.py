"""For ms-swift's ``--external_plugins``: ``python -m rl_safe_workers.adapters.swift`` prints the path of this file."""

from rl_safe_workers.adapters.swift.install import install

install()
