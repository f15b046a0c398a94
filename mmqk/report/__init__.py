"""Numbers to figures and pages. Imports no torch."""
