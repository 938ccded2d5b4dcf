"""The bytes of a torch_dist checkpoint: metadata, archives, pickles, and the rectangles that tensors are cut into.

The readers turn foreign bytes into plain records. They execute none of the bytes, and nothing here imports torch.
"""
