"""Provides `SafeTrainer`, which holds the parts and the lifecycle of one training rank.

A host calls the methods of a `SafeTrainer`, or those that ``actor.py`` adds to the host's class. Each phase first calls
every part.
"""
