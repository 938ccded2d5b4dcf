"""Private functions of torch, Megatron and Ray that more than one room needs; each is touched here alone.

Any room may come in. A module names the versions in which it saw what it touches. A private function that one module
needs stays in that module.
"""
