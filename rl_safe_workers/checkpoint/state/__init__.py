"""A rank's state, as parts of global tensors: model chunks, optimizer state, random state, common state.

The functions take live Megatron objects, and return shards, each a view of the live tensor.
"""
