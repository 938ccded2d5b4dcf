"""The control plane: lets ranks agree over the store, under a deadline, with signed messages.

`ControlPlane` takes a store, a rank and a secret. Its methods return a decision, or raise an error that names the ranks
that are missing or failed. Nothing here issues a collective.
"""
