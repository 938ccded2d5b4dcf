"""Which rank is to blame, for processes of any framework.

Processes, a store and the host's own knowledge come in by `diagnose`. A verdict with stacks and evidence leaves.
It needs neither Ray nor the driver.
"""
