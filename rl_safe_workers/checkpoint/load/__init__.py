"""A load under any layout: each rank reads its own parts. ``loader.py`` comes first."""
