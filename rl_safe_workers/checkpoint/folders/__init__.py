"""The folders of checkpoints: what makes one complete, who owns it, how it is made and removed.

The functions take a path. They return a manifest, claim a folder or refuse. Every write survives a crash of the
machine. Nothing here imports torch.
"""
