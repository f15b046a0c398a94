"""Figures and pages of reports. Imports no torch."""
