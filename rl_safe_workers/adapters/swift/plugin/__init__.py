"""The plugin that ms-swift imports: alone here, because ms-swift puts its folder first on the path of imports."""
