"""Outputs of a run: lines in the terminal, metrics, the ledger of communicators, a trace of phases, the report.

Records of phases and steps come in; files in the run's folder leave.
"""
