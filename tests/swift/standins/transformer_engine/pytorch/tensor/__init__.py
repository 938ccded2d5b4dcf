"""Tensors of 8-bit types: a class of which there are no objects."""


class QuantizedTensor: ...
