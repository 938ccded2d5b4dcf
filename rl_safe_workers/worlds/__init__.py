"""Makes the training world, the joint group with the rollout ranks, and the store where the ranks meet.

The functions take a store's address, and make a `TrainingWorld` or a `JointGroup`. `TrainingRank` is one rank of the
training world. Only this folder and ``comms`` create or destroy groups.
"""
