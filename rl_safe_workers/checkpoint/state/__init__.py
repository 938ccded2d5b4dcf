"""A rank's state, as parts of global tensors: model chunks, optimizer state, random state, common state.

Live Megatron objects come in; shards leave, each a view of the live tensor.
"""
