"""Saves and loads of torch_dist checkpoints without a collective; audits; slices for one host.

A save turns a rank's Megatron state into a folder with shards and a manifest; a load does the reverse. ``save`` and
``load`` do the work. ``state`` describes a rank's state, ``format`` the bytes of the files, and ``folders`` who owns
the files.
"""
