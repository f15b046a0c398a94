"""Effects, intervals, exact tests and corrections."""
