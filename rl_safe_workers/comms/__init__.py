"""Communicators: lists live groups, bootstraps, releases, rebuilds and destroys them.

The functions take the default group and Megatron's groups, and report the cost of each group. Only this folder and
``worlds`` create or destroy groups.
"""
