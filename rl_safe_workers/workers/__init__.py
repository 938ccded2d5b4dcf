"""`SafeTrainer`, which holds the parts and the lifecycle of one training rank.

A host calls its methods, or those that ``actor.py`` puts on the host's class. Each phase first calls every part.
"""
