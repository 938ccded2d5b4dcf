"""The training world, one rank of it, the group with the rollout ranks, and the store where the ranks meet.

The functions take a store's address, and make a `TrainingWorld` or a `JointGroup`. Only this folder and ``comms``
create or destroy groups.
"""
