"""The plugin for ms-swift's ``--external_plugins``. ``python -m rl_safe_workers.adapters.swift`` prints its path."""

from rl_safe_workers.adapters.swift.install import install

install()
