"""Fusible operations, named in annotations alone."""


class Sequential: ...


class FusibleOperation: ...
