"""The commands of ``rl-safe``. They parse, call and print.

Arguments come in by ``main.py``; an exit code leaves. Each ``NAME_command.py`` imports what it needs when it
runs, so that ``rl-safe --help`` starts at once.
"""
