"""Wraps private functions of torch, Megatron and Ray that more than one folder of the package needs.

Any folder may import this one. Only this folder uses these functions, and each module names the versions in which it
has seen them. A private function that only one module needs stays in that module.
"""
