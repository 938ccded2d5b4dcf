"""The bytes of a torch_dist checkpoint: metadata, archives, pickles, and the rectangles that tensors are cut into.

Foreign bytes come in; plain records leave. Nothing of them is executed, and nothing here imports torch.
"""
