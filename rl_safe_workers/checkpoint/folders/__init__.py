"""The folders of checkpoints: what makes one complete, whose it is, how it comes and goes.

A path comes in. A manifest, a claim or a refusal leaves. Every write here survives a crash of the machine. Nothing here
imports torch.
"""
