"""The training world, one rank of it, the group with the rollout ranks, and the store that they meet at.

A store's address comes in; a `TrainingWorld` or a `JointGroup` leaves. Only this room and ``comms`` create or destroy
groups.
"""
