"""Holds only the plugin that ms-swift imports, because ms-swift puts its folder first on the import path."""
