"""A load under any layout: each rank reads its own parts. Start with ``loader.py``."""
