"""Communicators: the catalog of live groups, their bootstrap, their release and their end.

A default group and Megatron's groups come in; a report of what each one cost leaves. Only this room and
``worlds`` create or destroy groups.
"""
