"""Processes and files of a run, found by the mark that each process carries, and their removal.

A run's id comes in. Nothing of other runs is touched. ``guardian.py`` outlives a killed driver.
"""
