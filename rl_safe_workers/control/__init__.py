"""The control plane: what ranks agree on over the store, under a deadline, with signed messages.

A store, a rank and a secret come in by `ControlPlane`. A decision leaves, or an error that names the ranks that are
missing or failed. Nothing here issues a collective.
"""
