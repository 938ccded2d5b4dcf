"""``rl-safe plan``: groups, memory, saves and hazards of a layout, without a GPU. Pure Python.

A recipe, or verl's or NeMo RL's configuration, comes in by ``request.py``. A `Plan` leaves, which ``tables.py``,
``as_json.py`` and ``picture.py`` show.
"""
