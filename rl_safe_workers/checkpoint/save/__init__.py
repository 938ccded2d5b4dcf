"""A save: each rank plans alone, the ranks agree over the store, each writes a file, and the manifest completes it.

Start with ``saver.py``. ``save_plan.py`` and ``balance.py`` decide which rank writes what.
"""
