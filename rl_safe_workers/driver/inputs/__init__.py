"""Inputs of a run: prompts, their lengths, the reward function, and the check of all of them before the run starts.

Paths and a recipe come in; rows of prompts and a reward function leave.
"""
