"""``rl-safe plan``: predicts the groups, memory, saves and hazards of a layout, without a GPU. Pure Python.

``request.py`` takes a recipe, or verl's or NeMo RL's configuration. The result is a `Plan`, which ``tables.py``,
``as_json.py`` and ``picture.py`` show.
"""
