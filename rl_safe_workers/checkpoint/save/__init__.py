"""A save: planned by each rank alone, agreed on over the store, written by all, made complete by the manifest.

``saver.py`` comes first. ``save_plan.py`` and ``balance.py`` decide which rank writes what.
"""
