"""Finds the processes and files of a run by the mark that each process carries, and removes them.

A run's id comes in. Nothing of other runs is touched. ``guardian.py`` outlives a killed driver.
"""
