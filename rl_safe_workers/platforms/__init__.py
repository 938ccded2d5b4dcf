"""The differences between CPUs and CUDA GPUs, and the owners of the device's memory.

``open_platform`` gives the platform of a device. ``cpu.py`` lets Megatron run on gloo.
"""
