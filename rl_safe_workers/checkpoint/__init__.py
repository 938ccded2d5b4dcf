"""Saves and loads of torch_dist checkpoints without a collective; audits; slices for one host.

A rank's Megatron state comes in; a folder with shards and a manifest leaves, and the other way round. ``save`` and
``load`` do the work. ``state`` says what is in a rank, ``format`` what is in the files, ``folders`` whose they are.
"""
