"""``rl-safe doctor``: finds facts about a machine and a cluster, and problems that they cause for a run.

``examine.py`` may take a recipe, and returns facts and findings. The doctor asks other processes about torch, Ray and
vLLM, and imports none of them.
"""
