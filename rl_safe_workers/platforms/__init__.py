"""What differs between CPUs and CUDA GPUs, and whose the device's memory is.

``open_platform`` gives the platform of a device. ``cpu.py`` lets Megatron run on gloo.
"""
