"""Effects with intervals, exact tests, and corrections for several claims."""
